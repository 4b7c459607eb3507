"""A reader that is late (google/orbax #3181): stock Orbax's other processes run into a time-out, ours wait."""

from __future__ import annotations

import pytest

from orbax_ext import lab

pytestmark = pytest.mark.core


def test_a_reader_45_s_late_breaks_stock_orbax_and_not_ours(late_restores: dict[str, lab.Run]) -> None:
    outcomes = late_restores["ours"].outcomes(180)
    assert [outcome.value for outcome in outcomes] == [[]] * 4, "\n".join(map(str, outcomes))
    assert not all(outcome.ok for outcome in late_restores["stock"].outcomes(60, grace=1))
