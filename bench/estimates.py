"""How long a call of the benchmark takes, from earlier results, and roughly from the limits where there are none."""

from __future__ import annotations

from collections.abc import Sequence

from bench.results import Result
from bench.scenarios import MIB, Scenario
from bench.strategies import AUTO, BASELINES, PLAIN, SINGLE

START = 1.0  # seconds to start the processes of four hosts, and to end them
_COMPARED = 600 * MIB  # bytes of all hosts that are compared in a second
_SAVING = 4.0  # seconds to start the processes and to make the links
_SAVED = 40 * MIB  # bytes that are saved in a second
_LOCAL = 200 * MIB  # bytes that are restored from the local disk in a second
_AROUND = 10.0  # seconds for what a run does before and after its restore, on busy cores
_LEAF = 0.004  # seconds for each leaf, however small
_SLOWER = 1.6  # times as long while another program keeps the cores busy


def seconds(scenario: Scenario, strategy: str, times: int, busy: bool, earlier: Sequence[Result]) -> float:
    """Returns the seconds that some runs with one strategy are expected to take, with all that is around them."""
    restore = _restore(scenario, strategy, busy, earlier)
    if busy and strategy != AUTO:
        restore = min(restore, most_busy(_restore(scenario, AUTO, busy, earlier)))
    return times * (around(scenario) + restore)


def most_busy(auto: float) -> float:
    """Returns the seconds after which other strategies are ended on busy cores, given those of `auto`.

    They are only measured to find one that is faster than the worst run of `auto`.
    """
    return _AROUND + 1.5 * auto


def around(scenario: Scenario) -> float:
    """Returns the seconds that a run takes before and after the restore."""
    return START * scenario.hosts / 4 + scenario.host_bytes * scenario.hosts / _COMPARED


def saving(scenario: Scenario) -> float:
    """Returns the seconds that it takes to save the scenario's state."""
    return _SAVING * scenario.hosts / 4 + scenario.host_bytes * scenario.hosts / _SAVED / scenario.replicas


def _restore(scenario: Scenario, strategy: str, busy: bool, earlier: Sequence[Result]) -> float:
    slower = _SLOWER if busy else 1.0
    like = (scenario.name, strategy, scenario.unique_bytes)
    same = [result for result in earlier if (result.scenario, result.strategy, result.unique_bytes) == like]
    for result in sorted(same, key=lambda result: result.busy != busy):  # one under the same condition first
        if result.failed:
            return scenario.time_limit
        return min(scenario.time_limit, result.seconds * (1.0 if result.busy == busy else slower))
    leaves = slower * _LEAF * scenario.leaves
    if not scenario.limit():
        return slower * scenario.host_bytes * scenario.hosts / _LOCAL + leaves
    factors = {PLAIN: scenario.replicas, SINGLE: scenario.replicas, AUTO: 1.3}
    factor = 2.0 * scenario.replicas if strategy in BASELINES[1:] else factors.get(strategy, 1.5)
    return min(scenario.time_limit, slower * factor * scenario.limit() + leaves)


def in_words(seconds: float) -> str:
    """Returns a duration for people: "40 s", "12 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
