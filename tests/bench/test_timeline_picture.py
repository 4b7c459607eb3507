"""The picture of the timeline: its size, and that the lanes are in it."""

from __future__ import annotations

import pathlib
import struct

import pytest

from bench import timeline_picture
from orbax_ext.report import page
from tests.support import browser as browser_lib
from tests.support import reports

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(browser_lib.missing()), reason=f"{browser_lib.missing()} is not installed"),
]


def size(picture: pathlib.Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


def test_the_picture_is_twice_as_wide_as_a_readme_and_as_high_as_its_lanes(tmp_path: pathlib.Path) -> None:
    heights = []
    for processes in (2, 6):
        html, picture = tmp_path / "page.html", tmp_path / f"{processes}.png"
        html.write_text(page.render(reports.make_report(processes)), encoding="utf-8")
        timeline_picture.take(html, picture)
        width, height = size(picture)
        assert width == 2 * 860
        heights.append(height)
    assert heights[0] + 4 * 2 * 20 < heights[1] < 2 * 900


def test_the_picture_in_the_documents_is_one_of_these() -> None:
    assert size(timeline_picture.PICTURE)[0] == 2 * 860


def test_no_browser_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(browser_lib, "missing", lambda: "chromium")
    assert timeline_picture.main([]) == 0
    assert "chromium is not installed" in capsys.readouterr().out
