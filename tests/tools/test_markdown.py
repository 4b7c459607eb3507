"""Generated pages are whole files."""

from __future__ import annotations

import pathlib

import pytest

from tools import markdown, releases

pytestmark = pytest.mark.once

PAGE = markdown.Page("folder/page.md", "Title", "What it is.", "make page")


def test_a_table_has_a_head_a_rule_and_a_line_per_row() -> None:
    assert markdown.table(("a", "b"), [(1, "x"), (2, "y")]) == "| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |"


def test_a_page_says_what_it_is_and_which_command_writes_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    PAGE.file.parent.mkdir()
    PAGE.file.write_text("anything")
    PAGE.write("one", "two")
    assert PAGE.file == tmp_path / "folder" / "page.md"
    assert PAGE.file.read_text() == ("# Title\n\nWhat it is.\n\nWritten by `make page`; do not edit.\n\none\n\ntwo\n")
