"""A reader that is late (google/orbax #3181): stock Orbax's other processes run into a time-out, ours wait."""

from __future__ import annotations

import pytest

from orbax_ext import lab


def test_a_reader_45_s_late_breaks_stock_orbax(stock_late_restore: lab.Run) -> None:
    assert not all(outcome.ok for outcome in stock_late_restore.outcomes(120, grace=1))


@pytest.mark.core
def test_a_reader_45_s_late_is_waited_for_by_ours(our_late_restore: lab.Run) -> None:
    outcomes = our_late_restore.outcomes(180)
    assert [outcome.value for outcome in outcomes] == [[]] * 4, "\n".join(map(str, outcomes))
