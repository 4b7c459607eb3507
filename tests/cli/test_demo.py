"""The table of `orbax-ext demo`."""

from __future__ import annotations

from typing import Any

import pytest

from orbax_ext.cli import demo
from orbax_ext.cli.demo import Row
from orbax_ext.lab import Failure, Outcome

pytestmark = pytest.mark.once


def returned(rank: int, seconds: float, **changed: Any) -> Outcome:
    return Outcome(rank, "returned", {"seconds": seconds, "bytes_read": 1_500_000, "changed": [*changed]})


def test_a_row_has_the_slowest_time_and_all_bytes() -> None:
    assert demo.row_of("ours", [returned(0, 1.0), returned(1, 2.504)]) == Row("ours", "restored", 2.5, 3.0, True)


def test_changed_leaves_are_named_once() -> None:
    row = demo.row_of("stock", [returned(0, 1.0, mask=1), returned(1, 1.0, mask=1, bias=1)])
    assert (row.outcome, row.exact) == ("changed bias, mask", False)


def test_a_failure_is_one_line() -> None:
    failed = Outcome(1, "raised", failure=Failure("ValueError", "no\nmore", ""))
    assert demo.row_of("stock", [returned(0, 1.0), failed]) == Row("stock", "failed on 1 of 2: ValueError: no")
    assert demo.row_of("stock", [Outcome(0, "timed out")]).outcome == "failed on 1 of 1: timed out"


def test_the_table_shows_sizes_and_durations() -> None:
    lines = demo.table([Row("ours", "restored", 2.5, 3.0, True), Row("stock", "failed on 1 of 2: no")]).splitlines()
    assert lines[0].split() == ["outcome", "time", "read", "exact"]
    assert lines[2].split() == ["ours", "restored", "2.5", "s", "3.0", "MB", "yes"]
    assert lines[3].split()[-3:] == ["-", "-", "no"]
