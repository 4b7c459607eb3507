"""When links change, and that the scenarios change them when they say."""

from __future__ import annotations

import pytest

from bench import predictions
from bench.changes import Change, stops
from bench.scenarios import MIB, scenarios
from orbax_ext.plan.boundary import bytes_of_groups
from orbax_ext.plan.forecast import described, forecast

pytestmark = pytest.mark.once

KNOWN = {scenario.name: scenario for scenario in scenarios()}


def test_a_change_is_due_by_time_and_by_the_bytes_of_its_links() -> None:
    assert Change(32, 1).from_the_start
    assert not Change(32, 1, seconds=1.0).is_due(0.9, [0, 0])
    assert Change(32, 1, seconds=1.0).is_due(1.0, [0, 0])
    assert not Change(32, 1, bytes=10).is_due(99.0, [100, 9])
    assert Change(32, 1, bytes=10).is_due(0.0, [0, 10])
    assert Change(32, bytes=10).is_due(0.0, [5, 5])


def test_every_host_stops_for_two_seconds_at_moments_of_its_own_and_goes_on() -> None:
    changes = stops(4, 320, seed=0)
    assert changes == stops(4, 320, seed=0)
    assert changes != stops(4, 320, seed=1)
    moments = []
    for host in range(4):
        rates = [(change.seconds, change.rate) for change in changes if change.host == host]
        begins, ends = rates[::2], rates[1::2]
        assert [rate for _, rate in begins] == [0] * len(begins)
        assert [end for end, _ in ends] == pytest.approx([begin + 2.0 for begin, _ in begins])
        assert {rate for _, rate in ends} == {320}
        moments += [begin for begin, _ in begins]
    assert len(set(moments)) == len(moments)


def test_the_dead_link_dies_between_the_first_and_the_second_group() -> None:
    scenario = KNOWN["dead_link"]
    mesh = forecast.mesh_on(scenario.mesh, scenario.hosts)
    leaves, _ = described.place(predictions.model(scenario), mesh, [])
    plan = forecast.forecast(
        leaves, mesh, scenario.hosts, predictions.link_rates(scenario), 1 << 40, "spread", "dp"
    ).plan
    first, second, *_ = bytes_of_groups(plan, [mesh], scenario.hosts)
    (change,) = scenario.changes
    assert first.share < change.bytes < first.share + second.share


@pytest.mark.parametrize("name", ["turning_slow", "turning_fast"])
def test_storage_turns_when_half_of_the_state_has_left_it(name: str) -> None:
    (change,) = KNOWN[name].changes
    assert (change.bytes, change.host) == (KNOWN[name].unique_bytes // 2, None)
    assert max(change.rate, KNOWN[name].links.storage) == 10 * min(change.rate, KNOWN[name].links.storage)


def test_a_link_that_changes_is_limited_from_the_start() -> None:
    for scenario in scenarios():
        assert scenario.links.to_storage or not scenario.changes


def test_chunks_of_far_storage_are_small() -> None:
    assert KNOWN["far_storage"].chunk_bytes == MIB // 4
