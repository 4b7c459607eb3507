"""The table of object stores, of which some are not tested in a run."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import time

import pytest

from tests.support import s3_server
from tools import markdown, releases, stores

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]

PASSED = {
    "tests.s3.test_stores::test_names_with_odd_characters": "passed",
    "tests.s3::test_faults[503 on metadata]": "skipped",
}
FAILED = {"tests.s3.test_stores::test_names_with_odd_characters": "failed"}
GCS = {"tests.multiprocess.test_gcs::test_four_processes_restore": "passed"}
THROTTLING = "throttling, internal errors"
ODD = "names with odd characters"


@pytest.fixture
def page(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A page of a run in which all stores were there."""
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    monkeypatch.setattr(stores, "missing", lambda store: None)
    monkeypatch.setattr(stores, "version", lambda store: f"1.2 of {store}")
    monkeypatch.setattr(stores, "_test", lambda store: GCS if store == "gcs" else PASSED)
    assert stores.main(["--write"]) == 0
    return tmp_path / stores.PAGE.path


def columns(page: pathlib.Path, kind: str) -> dict[str, str]:
    head, *rows = markdown.tables_in(page.read_text())[0]
    return dict(zip(head[1:], next(row[1:] for row in rows if row[0] == kind), strict=True))


def test_the_page_has_a_column_for_each_store(page: pathlib.Path) -> None:
    assert columns(page, ODD) == dict.fromkeys(stores.S3_STORES.values(), "1 of 1")
    assert columns(page, THROTTLING) == dict.fromkeys(stores.S3_STORES.values(), "-")
    assert columns(page, "version") == {title: f"1.2 of {store}" for store, title in stores.S3_STORES.items()}
    gcs = [["gs://", ""], ["version", "1.2 of gcs"], ["four processes restore", "passed"]]
    assert markdown.tables_in(page.read_text())[1] == gcs


@pytest.mark.parametrize("kind", stores.KINDS)
def test_each_pattern_of_a_kind_finds_tests(kind: str) -> None:
    """Names of functions and texts, which are the names of cases, in the sources of the tests that run on stores."""
    names = set()
    for place in stores.S3_TESTS:
        path = ROOT / place
        for file in sorted(path.glob("test_*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names.add(node.value)
    for pattern in stores.KINDS[kind].split("|"):
        assert any(re.search(pattern, name) for name in names), pattern


def test_stores_that_are_missing_are_named_and_keep_their_results(
    page: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text()
    monkeypatch.setattr(stores, "missing", lambda store: None if store == "rclone" else f"no {store} here")
    monkeypatch.setattr(stores, "_test", lambda store: PASSED if store == "rclone" else pytest.fail("was tested"))
    assert stores.main(["--write"]) == 0
    assert page.read_text() == before
    output = capsys.readouterr().out
    for store in ("radosgw", "swift", "gcs"):
        assert f"{store}: not tested: no {store} here\n" in output


def test_nothing_is_written_if_all_are_missing(page: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page.unlink()
    monkeypatch.setattr(stores, "missing", lambda store: "nothing here")
    assert stores.main(["--write"]) == 0
    assert not page.exists()


def test_only_the_columns_of_tested_stores_change(page: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_test", lambda store: FAILED)
    assert stores.main(["--only", "swift", "--write"]) == 1
    found = columns(page, ODD)
    assert found.pop(stores.S3_STORES["swift"]) == "0 of 1"
    assert set(found.values()) == {"1 of 1"}
    assert len(markdown.tables_in(page.read_text())) == 2


def test_a_store_that_does_not_end_fails_and_the_others_are_tested(
    page: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tested = []

    def test(store: str) -> stores.Outcomes:
        tested.append(store)
        if store == "radosgw":
            raise subprocess.TimeoutExpired("pytest", 1800)
        return PASSED

    monkeypatch.setattr(stores, "_test", test)
    assert stores.main(["--only", "radosgw", "swift", "--write"]) == 1
    assert tested == ["radosgw", "swift"]
    assert "radosgw: failed: Command 'pytest' timed out after 1800 seconds\n" in capsys.readouterr().out
    assert set(columns(page, ODD).values()) == {"1 of 1"}


def test_tests_that_do_not_end_are_killed_with_their_servers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = tmp_path / "test_silent.py"
    started = tmp_path / "started"
    test.write_text(
        "import pathlib, subprocess, time\n"
        "def test_silent():\n"
        "    server = subprocess.Popen(['sleep', '600'])\n"
        f"    path = pathlib.Path({str(started)!r})\n"
        "    path.with_suffix('.new').write_text(str(server.pid))\n"
        "    path.with_suffix('.new').rename(path)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setattr(stores, "S3_TESTS", (str(test), "-p", "no:cacheprovider"))

    class Started(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            deadline = time.monotonic() + 120  # to start pytest, on a busy machine
            while timeout is not None and self.poll() is None and not started.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(stores, "_LIMIT", 1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        stores._test("rclone")
    if sys.platform == "linux":
        status = pathlib.Path(f"/proc/{started.read_text()}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()


def test_each_store_of_the_table_says_whether_it_is_missing() -> None:
    assert stores.S3_STORES.keys() == s3_server.STORES.keys()
    for store in (*stores.S3_STORES, "gcs"):
        reason = stores.missing(store)
        assert reason is None or "missing" in reason or "need" in reason
        assert reason is not None or re.fullmatch(r"\d+(\.\d+)+", stores.version(store))
