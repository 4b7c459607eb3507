"""A late reader (google/orbax #3181): the other processes of stock Orbax time out, ours wait."""

from __future__ import annotations

import pytest

from orbax_ext import lab

pytestmark = pytest.mark.usefixtures("late_restores")

TIMED_OUT = "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out"


def test_a_reader_45_s_late_breaks_stock_orbax(stock_late_restore: lab.Run) -> None:
    outcomes = stock_late_restore.outcomes(120, grace=1)
    # The other processes are stopped a second after the first failure.
    assert any(TIMED_OUT in str(outcome) for outcome in outcomes), "\n".join(map(str, outcomes))


@pytest.mark.core
def test_ours_waits_for_a_reader_45_s_late(our_late_restore: lab.Run) -> None:
    outcomes = our_late_restore.outcomes(180)
    assert [outcome.value for outcome in outcomes] == [[]] * 4, "\n".join(map(str, outcomes))
