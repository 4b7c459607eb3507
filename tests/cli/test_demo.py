"""The rows and the table of `orbax-ext demo`."""

from __future__ import annotations

import contextlib
import json
import pathlib
import webbrowser
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import pytest
from orbax.checkpoint._src.serialization import serialization

import orbax_ext
from orbax_ext.cli import exits, main
from orbax_ext.cli.demo import acts, command, rows, storage, work
from orbax_ext.cli.demo.rows import Act, Row
from orbax_ext.lab import Failure, Outcome
from orbax_ext.report.spans import Span
from orbax_ext.transfer import boxes

pytestmark = pytest.mark.once


def returned(rank: int, seconds: float, **changed: str) -> Outcome:
    return Outcome(rank, "returned", {"seconds": seconds, "bytes_read": 1_500_000, "changed": changed})


def raised(rank: int, message: str) -> Outcome:
    return Outcome(rank, "raised", failure=Failure("ValueError", message, ""))


def test_a_row_has_the_slowest_time_and_all_bytes() -> None:
    assert rows.row_of("ours", [returned(0, 1.0), returned(1, 2.504)]) == Row("ours", "restored", 2.5, 3.0, True)


def test_a_row_says_what_the_slowest_process_waited() -> None:
    values = ({"seconds": 1.0, "changed": {}, "waiting": waiting} for waiting in (0.1, 0.25))
    row = rows.row_of("ours", [Outcome(rank, "returned", value) for rank, value in enumerate(values)])
    assert row.outcome == "restored; up to 250 ms to meet, connect, compile"


def test_a_row_has_the_longest_first_meeting() -> None:
    values = ({"seconds": 1.0, "changed": {}, "meeting": meeting} for meeting in (0.1, 0.25))
    assert rows.row_of("ours", [Outcome(0, "returned", value) for value in values]).meeting == 0.25
    assert rows.row_of("plain", [returned(0, 1.0)]).meeting is None


def test_a_row_names_those_whose_part_others_read() -> None:
    values = ({"seconds": 1.0, "changed": {}, "taken_over": processes} for processes in ([3], [1, 3]))
    row = rows.row_of("ours", [Outcome(rank, "returned", value) for rank, value in enumerate(values)])
    assert (row.outcome, row.taken_over) == ("restored; others read the part of processes 1, 3", (1, 3))


def test_changed_leaves_are_named_once_with_their_change() -> None:
    row = rows.row_of("stock", [returned(0, 1.0, mask="x became y"), returned(1, 1.0, mask="x became y", bias="bits")])
    assert (row.outcome, row.exact) == ("changed bias (bits), mask (x became y)", False)


def test_a_failure_says_how_many_failed_and_how_many_hung() -> None:
    row = rows.row_of("stock", [raised(0, "no\nmore"), Outcome(1, "timed out"), Outcome(2, "timed out")], grace=3.0)
    assert row == Row("stock", "1 of 3 processes failed: ValueError: no more; 2 of 3 processes hung (ended after 3 s)")
    assert rows.row_of("stock", [Outcome(0, "died")]).outcome == "1 of 1 process died"


def test_a_long_error_is_cut() -> None:
    assert rows.row_of("stock", [raised(0, "x" * 500)]).outcome.endswith("x...")


def test_the_table_shows_sizes_and_durations_and_wraps_outcomes() -> None:
    good, bad = Row("ours", "restored", 2.5, 3.0, True), Row("stock", "word " * 15 + "end")
    lines = rows.table([Act("a", "", "", (good, bad))]).splitlines()
    assert lines[0].split() == ["act", "outcome", "time", "read", "exact"]
    assert lines[2].split() == ["a", "ours", "restored", "2.5", "s", "3.0", "MB", "yes"]
    assert lines[3].split()[-3:] == ["-", "-", "-"]
    assert lines[4].split()[-1] == "end"


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (Row("ours", "restored", 1.0, 33.0, True), True),
        (Row("ours", "restored", 1.0, 70.0, True), False),
        (Row("ours", "changed mask", 1.0, 33.0, False), False),
        (Row("ours", "1 of 4 processes died"), False),
    ],
)
def test_the_claim_of_act_b_needs_every_bit_and_every_byte_once(row: Row, kept: bool) -> None:
    assert (not acts._not_once(row, 32)) == kept


@pytest.mark.parametrize(("ours", "kept"), [(1.0, True), (4.0, False), (None, False)])
def test_ours_must_be_faster_than_those_that_restored(ours: float | None, kept: bool) -> None:
    others = {"plain": Row("plain", "restored", 3.0), "stock": Row("stock", "failed")}
    assert (not acts._not_fastest({**others, "ours": Row("ours", "restored", ours)})) == kept


@pytest.mark.parametrize(
    ("plain", "ours", "meeting", "kept"),
    [
        (1.0, 0.9, None, True),
        (1.0, 1.9, 0.7, True),  # 0.3 s are for noise
        (1.0, 2.1, 0.7, False),
        (1.0, 1.4, None, False),
        (None, 1.4, None, True),
    ],
)
def test_ours_may_be_slower_than_plain_orbax_by_its_first_meeting(
    plain: float | None, ours: float, meeting: float | None, kept: bool
) -> None:
    rows = (Row("plain", "restored", plain), Row("ours", "restored", ours, meeting=meeting))
    assert (not acts._slower(*rows)) == kept


def test_the_fastest_of_several_restores_counts_unless_one_is_not_exact() -> None:
    slow, fast, other = (Row("ours", "", seconds, exact=True) for seconds in (3.0, 1.0, 2.0))
    assert acts._fastest([slow, fast, other]) is fast
    wrong, failed = Row("ours", "changed mask", 2.0, exact=False), Row("ours", "1 of 4 processes failed")
    assert acts._fastest([slow, fast, wrong]) is wrong
    assert acts._fastest([slow, failed, fast]) is failed


def test_act_a_restores_by_turns_and_compares(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    told: list[str] = []

    def restores(seconds: dict[str, float]) -> Callable[..., tuple[Row, list[Outcome]]]:
        return lambda stage, kind, name, **_: (Row(name, "restored", seconds[kind], exact=True, meeting=0.5), [])

    stage = acts.Stage(None, tmp_path, 1, told.append)  # type: ignore[arg-type]
    monkeypatch.setattr(acts, "_outcome", restores({"plain": 1.0, "stock": 1.0, "ours": 1.7}))
    assert acts.exactness(stage).kept
    monkeypatch.setattr(acts, "_outcome", restores({"plain": 1.0, "stock": 1.0, "ours": 2.0}))
    assert acts.exactness(stage).broken == (
        "again, it took 1.00 s more than plain Orbax; its first meeting took 0.50 s of them",
    )
    assert len(told) == 2 * 5


def test_reads_are_late_from_when_all_processes_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A process that starts more slowly than the others would not have to wait for long, and stock Orbax would do."""
    done: list[str] = []

    def late(seconds: float) -> AbstractContextManager[None]:
        done.append("late")
        return contextlib.nullcontext()

    monkeypatch.setattr(orbax_ext, "barrier", lambda name: done.append("together"))
    monkeypatch.setattr(storage, "late", late)
    sizes, path = (1, 1, jax.device_count()), str(tmp_path / "checkpoint")
    work.save(path, 1, [1], sizes)
    assert work.restore(path, 1, "plain", sizes=sizes, late=1.0)["changed"] == {}
    assert done == ["together", "late"]


@pytest.mark.parametrize(("taken_over", "kept"), [((0,), True), ((1, 0), True), ((), False), ((2,), False)])
def test_the_claim_of_act_c_needs_another_reader(taken_over: tuple[int, ...], kept: bool) -> None:
    assert (not acts._not_taken_over(Row("ours", "restored", taken_over=taken_over))) == kept


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ('Error reading "weights/3.0" in OCDBT database at local file "{step}/default/": Requested', True),
        ('Error reading "mask/0" in OCDBT database at local file "{step}/default/"', False),  # not damaged
        ("Error reading weights in {step}/default/", False),
        ('Error reading "weights/3.0" in {step}/', False),
        ('Error reading "weights/3.0"', False),
    ],
)
def test_the_claim_of_act_d_needs_a_damaged_leaf_and_its_database(
    monkeypatch: pytest.MonkeyPatch, message: str, kept: bool
) -> None:
    step = pathlib.Path("/run/2")
    damaged = {"/run/2/default": ("first_moment", "weights")}
    monkeypatch.setattr(work, "damaged_leaves", damaged.__getitem__)
    outcomes = [raised(rank, message.format(step=step)) for rank in range(2)]
    assert (not acts._not_named(outcomes, step, step / "default" / "d" / "0f")) == kept
    assert acts._not_named([*outcomes, returned(2, 1.0)], step, step / "default" / "d" / "0f")


@pytest.mark.parametrize(("seconds", "kept"), [(1.0, True), (0.2, False)])
def test_ours_must_not_read_faster_than_its_storage(seconds: float, kept: bool) -> None:
    assert (not acts._not_paced([returned(0, 1.0), returned(1, seconds)])) == kept


@pytest.mark.parametrize("slow", [storage.late, storage.paced])
def test_storage_is_slow_for_orbax_and_for_ours(slow: Callable[[float], AbstractContextManager[None]]) -> None:
    before = (serialization.async_deserialize, boxes.fetch)
    with slow(1.0):
        assert serialization.async_deserialize is not before[0]
        assert boxes.fetch is not before[1]
    assert (serialization.async_deserialize, boxes.fetch) == before


def test_waiting_counts_the_time_of_overlapping_spans_once() -> None:
    spans = [Span("wait", 0, 2), Span("connect", 1, 3), Span("read", 0, 9), Span("compile", 5, 6)]
    assert work._waiting(spans) == 4


def test_the_first_meeting_is_the_first_wait() -> None:
    assert work._first_meeting([Span("read", 0, 1), Span("wait", 5, 9), Span("wait", 1, 1.5)]) == 0.5
    assert work._first_meeting([Span("read", 0, 1)]) is None


def played(
    monkeypatch: pytest.MonkeyPatch, *words: str, broken: tuple[str, ...] = ()
) -> tuple[int, set[str], list[str]]:
    """Runs the command with acts that are made up; returns its exit code, the acts played and the pages opened."""
    letters: set[str] = set()
    opened: list[str] = []

    def play(folder: pathlib.Path, wanted: set[str], *rest: object) -> list[Act]:
        letters.update(wanted)
        return [Act("b", "slow", "is fast", (Row("ours", "restored"),), broken, page="<html>b</html>")]

    def open_page(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(command, "_play", play)
    monkeypatch.setattr(webbrowser, "open", open_page)
    return main.main(["demo", *words]), letters, opened


def test_one_act_can_be_played_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(monkeypatch, "--act", "d") == (exits.EXIT_OK, {"d"}, [])
    assert played(monkeypatch)[1] == {"a", "b", "c", "d", "e"}


def test_open_writes_the_page_of_act_b_and_opens_it(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.html"
    code, letters, opened = played(monkeypatch, "--act", "d", "--open", "--html", str(page))
    assert (code, letters, opened) == (exits.EXIT_OK, {"b", "d"}, [page.as_uri()])
    assert page.read_text() == "<html>b</html>"


def test_a_broken_claim_is_the_exit_code_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert played(monkeypatch, "--act", "b", broken=("too slow",))[0] == exits.EXIT_BAD_VERDICT
    assert "is fast: NO\n     too slow\n" in capsys.readouterr().out
    assert played(monkeypatch, "--act", "b", "--json", broken=("too slow",))[0] == exits.EXIT_BAD_VERDICT
    assert json.loads(capsys.readouterr().out)["ok"] is False
