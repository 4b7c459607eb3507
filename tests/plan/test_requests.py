"""The number of requests follows what they achieve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_ext.plan.requests import Answers, RequestLimit

pytestmark = pytest.mark.once


def limits(rate_with: dict[int, float], most: int = 512, windows: int = 8) -> list[int]:
    """Returns the limits after each window, on a store that is as fast as `rate_with` the limit says."""
    limit, seen = RequestLimit(most), []
    for _ in range(windows):
        limit.note(Answers(2 * limit.current, 0, int(rate_with[limit.current]), 1.0))
        seen.append(limit.current)
    return seen


def test_it_rises_while_the_rate_does_and_goes_back_once() -> None:
    rates = {128: 1e6, 256: 2e6, 512: 2.1e6}
    assert limits(rates, most=1024, windows=4) == [256, 512, 256, 256]


def test_it_does_not_rise_above_its_maximum() -> None:
    assert limits({128: 1e6, 256: 2e6, 512: 4e6}) == [256, *[512] * 7]
    assert limits({64: 1e6}, most=64) == [64] * 8


def test_few_requests_say_nothing() -> None:
    limit = RequestLimit(512)
    assert not limit.note(Answers(255, 0, 10**9, 1.0))
    assert limit.current == 128


def test_refused_requests_lower_it_and_it_rises_again_slowly() -> None:
    limit = RequestLimit(512)
    limit.note(Answers(100, 2, 100, 1.0))
    assert limit.current == 64
    limit.note(Answers(128, 0, 1000, 1.0))
    limit.note(Answers(144, 0, 1200, 1.0))
    assert limit.current == 81
    limit.note(Answers(162, 0, 1200, 1.0))  # no faster: back, and it stays there
    limit.note(Answers(1000, 0, 5000, 1.0))
    assert limit.current == 72


def test_one_refusal_among_many_requests_changes_nothing() -> None:
    limit = RequestLimit(128)
    limit.note(Answers(200, 2, 100, 1.0))
    assert limit.current == 128


@given(st.integers(1, 600), st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 1), st.integers(0, 10**9))))
def test_it_stays_between_few_and_the_most(most: int, windows: list[tuple[int, float, int]]) -> None:
    limit = RequestLimit(most)
    for requests, refused, read in windows:
        before = limit.current
        limit.note(Answers(requests, int(requests * refused), read, 0.1))
        assert min(8, most) <= limit.current <= most
        assert limit.current <= 2 * before
