"""The pages that are made from data are up to date."""

from __future__ import annotations

import pathlib

import pytest

from tests.faults import table
from tools import docs, markdown, releases

pytestmark = pytest.mark.once


def test_pages_are_what_the_data_gives() -> None:
    assert [page.path for page, parts in docs.pages() if docs.is_stale(page, *parts)] == [], "run: make docs"


def test_a_missing_or_different_page_is_stale(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    page = markdown.Page("page.md", "Title", "What it is.", "make page")
    assert docs.is_stale(page, "content")
    page.write("content")
    assert not docs.is_stale(page, "content")
    assert docs.is_stale(page, "other content")


def test_checking_writes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    assert docs.main(["--check"]) == 1
    assert "docs/defects.md" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0


def test_new_faults_replace_their_rows_and_keep_the_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    table.write([table.Row("a", "hang", "ok"), table.Row("b", "hang", "ok")], "0.12.8")
    table.write([table.Row("b", "dead", "ok"), table.Row("c", "hang", "ok")], "0.12.8")
    table.write([table.Row("a", "hang", "ok")], "0.11.33")
    measured = table.load()
    assert [(row.fault, row.stock) for row in measured["0.12.8"]] == [("a", "hang"), ("b", "dead"), ("c", "hang")]
    assert [row.fault for row in measured["0.11.33"]] == ["a"]
    assert table.PAGE.file.read_text() == table.PAGE.text(*table.parts(measured))
