"""`orbax-ext report`."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from orbax_ext.cli import exits, main
from tests.support import reports

pytestmark = pytest.mark.once


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "restore.json"
    path.write_text(reports.make_report(6, slow=4).to_json())
    return path


def test_the_text_shows_where_the_time_went(file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(file)]) == exits.EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("restored: 6 processes")
    assert "critical path: read on process 4 (host-0) " in out
    assert "waited for: process 4 (host-0) by 5 processes (" in out


def test_a_page_and_a_trace_are_written(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main.main(["report", str(file), "--html", str(page), "--trace", str(trace)]) == exits.EXIT_OK
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]


def test_json_has_the_critical_path_and_the_waits(file: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(file), "--json"]) == exits.EXIT_OK
    analysis = json.loads(capsys.readouterr().out)
    assert [step["process"] for step in analysis["critical_path"] if step["phase"] == "read"] == [4] * 4
    assert analysis["waited_for"][0]["process"] == 4
    assert [member["process"] for member in analysis["members"]] == list(range(6))


def test_a_failed_restore_is_a_bad_verdict(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "failed.json"
    path.write_text(dataclasses.replace(reports.make_report(1), error="OSError: the disk is gone").to_json())
    assert main.main(["report", str(path)]) == exits.EXIT_BAD_VERDICT
    assert "error: OSError: the disk is gone" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "why"), [(None, "No such file"), ("{}", "not a report of orbax_ext")])
def test_another_file_is_refused_in_one_line(
    text: str | None, why: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    assert main.main(["report", str(path)]) == exits.EXIT_CANNOT_RUN
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_a_page_that_cannot_be_written_is_reported_in_one_line(
    file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["report", str(file), "--html", "/nowhere/page.html"]) == exits.EXIT_CANNOT_RUN
    assert capsys.readouterr().err == "orbax-ext report: /nowhere/page.html: No such file or directory\n"
