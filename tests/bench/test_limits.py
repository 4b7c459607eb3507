"""What links need at least, with rates that stay the same and rates that change."""

from __future__ import annotations

import math

import pytest

from bench.changes import Change
from bench.limits import seconds_needed
from bench.scenarios import MIB, scenarios

pytestmark = pytest.mark.once

KNOWN = {scenario.name: scenario for scenario in scenarios()}
GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("dense", GIB / 4 / 40e6),
        ("fast_storage", 128 * MIB / 60e6),  # some travels while most is read
        ("shared_link", 256 * MIB / 50e6),
        ("capped_storage", 128 * MIB / 40e6),
        ("balanced", 256 * MIB / 50e6),  # of both links, 25 MB/s each
        ("slow_host", GIB / (3 * 40e6 + 4e6)),
        ("dead_link", (GIB - 9 * MIB) / (3 * 40e6)),
        ("turning_slow", 128 * MIB / 4 / 40e6 + 128 * MIB / 4 / 4e6),
        ("demo_state", 0.0),
    ],
)
def test_a_scenarios_limit(name: str, seconds: float) -> None:
    assert KNOWN[name].limit() == pytest.approx(seconds)


def test_more_hosts_with_the_same_work_have_the_same_limit() -> None:
    assert KNOWN["hosts_2"].limit() == KNOWN["hosts_4"].limit() == KNOWN["hosts_8"].limit()


def test_both_links_of_a_host_carry_until_the_end_where_a_mixture_is_best() -> None:
    half = 128 * MIB / 4 / 5e6  # the first half, over storage links of 5 MB/s
    rest = (256 * MIB - 30e6 * half) / (50e6 + 25e6)
    assert KNOWN["turning_fast"].limit() == pytest.approx(half + rest)


def test_stops_cost_the_time_in_which_links_stand_still() -> None:
    one_stop = [Change(0, 0, seconds=1.0), Change(8, 0, seconds=3.0)]
    assert seconds_needed(4_000_000, 0, [1e6], math.inf, one_stop) == pytest.approx(6.0)
    assert seconds_needed(900_000, 0, [1e6], math.inf, one_stop) == pytest.approx(0.9)
    assert KNOWN["dense"].limit() < KNOWN["jitter"].limit() < 2 * KNOWN["dense"].limit()


def test_a_change_waits_for_bytes_of_its_host_or_of_all() -> None:
    assert seconds_needed(4000, 0, [100.0, 100.0], 0.0, [Change(0, 1, bytes=500)]) == pytest.approx(5 + 30)
    both = [Change(0, None, bytes=500), Change(8, None, seconds=4.0)]
    assert seconds_needed(500 + 2_000_000, 0, [100.0, 100.0], 0.0, both) == pytest.approx(4.0 + 1.0)


def test_without_any_link_the_limit_is_infinite() -> None:
    assert seconds_needed(10, 0, [1.0], 0.0, [Change(0, 0, seconds=5.0)]) == math.inf
