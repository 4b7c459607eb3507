"""The table of Orbax's defects; `orbax-ext doctor` is tested in tests/cli."""

from __future__ import annotations

import pytest

from orbax_ext.upstream.defects import DEFECTS, Defect, markdown_table

pytestmark = pytest.mark.once

OPEN = Defect("open", "Is open", "it fails", breaks=True, reports=(7,), first="0.11.35", patch="01-open")
FIXED = Defect("fixed", "Is fixed", "it is slow", breaks=False, fixed="0.12.0")


@pytest.mark.parametrize(("release", "expected"), [("0.11.34", False), ("0.11.35", True), ("1.0.0", True)])
def test_an_open_defect_is_in_all_releases_from_the_first_on(release: str, expected: bool) -> None:
    assert OPEN.in_release(release) is expected


@pytest.mark.parametrize(("release", "expected"), [("0.11.40", True), ("0.12.0", False), ("0.12.0+ext.1", False)])
def test_a_fixed_defect_is_in_the_releases_before_the_fix(release: str, expected: bool) -> None:
    assert FIXED.in_release(release) is expected


def test_registering_is_the_first_remedy_of_every_defect() -> None:
    assert OPEN.remedies == ("register", "patch 01-open")
    assert FIXED.remedies == ("register", "upgrade to 0.12.0")


def test_releases_and_reports_are_named() -> None:
    assert (OPEN.releases, FIXED.releases) == ("0.11.35 and newer", "0.11.33 to the one before 0.12.0")
    assert OPEN.links == ("https://github.com/google/orbax/issues/7",)


def test_the_table_has_a_row_for_every_defect_and_marks_those_that_break() -> None:
    head, _, *rows = markdown_table().split("\n\n")[0].splitlines()
    assert head == "| defect | what happens | Orbax releases | fixed by |"
    assert len(rows) == len(DEFECTS)
    assert [row.startswith("| **") for row in rows] == [defect.breaks for defect in DEFECTS]
