"""`orbax-ext demo`, act by act, on real processes."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from orbax_ext.cli import exits, main
from orbax_ext.cli.demo import acts, work
from orbax_ext.lab import Cluster

pytestmark = pytest.mark.once


# What orbax_ext does not keep if something else keeps the machine busy for a moment. All else it keeps always.
ONLY_BUSY = re.compile(r"was not slower$|^again, it took |^it read |^nobody else read the part ")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the JSON of a demo of all acts, by act, and the page that it wrote."""
    page = tmp_path_factory.mktemp("demo") / "page.html"
    result = play("--html", str(page))
    assert result["timeline"] == str(page)
    played = {act["act"]: kept(act) for act in result["acts"]}
    assert list(played) == ["a", "b", "c", "d"]
    return {
        "page": page.read_text(),
        **{letter: {row["way"]: row for row in act["rows"]} for letter, act in played.items()},
    }


def play(*words: str) -> dict[str, Any]:
    """Runs the demo and returns its JSON, which says the same as the exit code."""
    command = [sys.executable, "-m", "orbax_ext.cli", "demo", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode in (exits.EXIT_OK, exits.EXIT_BAD_VERDICT), done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) == {"ok", "seconds", "versions", "acts", "timeline"}
    assert result["ok"] == (done.returncode == exits.EXIT_OK) == all(act["kept"] for act in result["acts"])
    for act in result["acts"]:
        assert set(act) == {"act", "title", "claim", "kept", "broken", "rows"}
        keys = {"way", "outcome", "seconds", "megabytes_read", "exact", "meeting", "taken_over"}
        assert all(set(row) == keys for row in act["rows"])
    return result


def kept(act: dict[str, Any]) -> dict[str, Any]:
    """Returns an act in which orbax_ext did all that it claims; plays it up to twice more if it only took too long."""
    for _ in range(2):
        if not act["kept"]:
            assert all(map(ONLY_BUSY.search, act["broken"])), act
            (act,) = play("--act", act["act"])["acts"]
    assert act["kept"], act
    return act


@pytest.mark.parametrize("act", ["a", "b"])
def test_only_ours_and_plain_orbax_are_exact(demo: dict[str, Any], act: str) -> None:
    plain, stock, ours = list(demo[act].values())[:3]
    assert (plain["exact"], ours["exact"]) == (True, True)
    assert not stock["exact"]


def test_ours_reads_every_byte_once_where_storage_is_slow(demo: dict[str, Any]) -> None:
    plain, _, ours = demo["b"].values()
    assert ours["megabytes_read"] < plain["megabytes_read"] / 3


def test_ours_says_what_it_waited(demo: dict[str, Any]) -> None:
    for act in ("a", "b", "c"):
        assert "to meet, connect, compile" in demo[act]["orbax_ext"]["outcome"]
        assert demo[act]["orbax_ext"]["meeting"] > 0
        assert demo[act][next(iter(demo[act]))]["meeting"] is None  # plain Orbax, or its handler


def test_plain_orbax_and_ours_restore_again(demo: dict[str, Any]) -> None:
    plain, ours = list(demo["a"].values())[3:]
    assert (plain["way"], ours["way"]) == ("plain Orbax, best of 5", "orbax_ext, best of 5")
    assert plain["exact"]
    assert ours["exact"]


def test_a_late_reader_fails_stock_but_not_ours(demo: dict[str, Any]) -> None:
    stock, ours = demo["c"].values()
    if not fails(stock):  # on a busy machine the other processes may be as late as the reader: then nobody waits
        (act,) = play("--act", "c")["acts"]
        stock, ours = kept(act)["rows"]
    assert fails(stock)
    assert ours["exact"]
    assert work.LATE_PROCESS in ours["taken_over"]
    assert re.search(r"others read the part of process(es)? 0", ours["outcome"])


def fails(row: dict[str, Any]) -> bool:
    return "failed" in row["outcome"] or "hung" in row["outcome"]


def test_a_damaged_file_leaves_stock_hanging_and_fails_ours_everywhere(demo: dict[str, Any]) -> None:
    stock, ours, before = demo["d"].values()
    assert "3 of 4 processes hung" in stock["outcome"]
    assert ours["outcome"].startswith("4 of 4 processes failed: RestoreFailedError")
    assert re.search(r'Error reading "(weights|\w+_moment)/[\d.]+" .* "/.*/checkpoints/2/default/', ours["outcome"])
    assert before["exact"]


def test_the_page_shows_the_restore_of_all_processes(demo: dict[str, Any]) -> None:
    assert "<html" in demo["page"]
    assert "on 4 processes" in demo["page"]


def test_a_restore_that_is_not_exact_fails_the_act(tmp_path: pathlib.Path) -> None:
    """Nothing is damaged, so orbax_ext does not fail, and the act has to say so."""
    with Cluster(2, 2) as cluster:
        stage = acts.Stage(cluster, tmp_path, 1, lambda line: None)
        cluster.run(work.save, stage.path, 1, [1, 2], (1, 2, 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acts, "MESH", (1, 2, 2))
            patch.setattr(acts, "cut_a_file", lambda step: step / "default" / "manifest.ocdbt")
            act = acts.damage(stage)
    assert not act.kept
    assert act.broken[0].startswith("not every process failed")


def test_bad_arguments_are_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--megabytes", "0"]) == exits.EXIT_CANNOT_RUN
    assert capsys.readouterr().err == "orbax-ext demo: a demo needs a state of at least 1 megabyte\n"
