"""The protocol in simulated worlds: 3,000 seeds, every seed that ever failed, and defects that must be found.

`make simulate SEEDS=100000` runs more, `make simulate SEED=17` runs one of them again and prints its trace.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from unittest import mock

import pytest

from tests.simulation import mutations, plans, processes, runs, track_record

pytestmark = pytest.mark.once

SEEDS = 3000
CHUNKS = 12
WORLDS = 4  # in which each plan of the track record runs
PAGE = pathlib.Path(__file__).parents[2] / "docs/internals/simulation.md"
TRACK_RECORD = track_record.load()
WHAT_IT_WAS = dict(re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("number", range(CHUNKS))
def test_every_seed_ends_as_it_must(number: int) -> None:
    failed = list(runs.failing(range(number, SEEDS, CHUNKS)))
    assert not failed, "\n\n".join(f"{ended.plan}\n" + "\n".join(ended.problems) for ended in failed[:3])


@pytest.mark.parametrize("seed", TRACK_RECORD)
def test_seeds_that_once_failed_pass(seed: str) -> None:
    plan = TRACK_RECORD[seed]
    worlds = [plan.seed, *range(1, WORLDS)]  # the same faults, with other delays too
    failed = {
        world: problems for world in worlds if (problems := runs.run(dataclasses.replace(plan, seed=world)).problems)
    }
    assert not failed, f"it once failed: {WHAT_IT_WAS[seed]}"


def test_the_track_record_says_what_each_failure_was() -> None:
    assert list(TRACK_RECORD) == list(WHAT_IT_WAS)
    assert [str(plan.seed) for plan in TRACK_RECORD.values()] == list(TRACK_RECORD)


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_defect_is_found(mutation: mutations.Mutation) -> None:
    with mutations.applied(mutation):
        failed = next(runs.failing([mutation.seed, *range(SEEDS)]), None)
    assert failed is not None


@pytest.mark.parametrize("kind", ["never", "stuck", "stalled share"])
def test_a_large_job_in_which_each_process_looks_less_often_ends_as_it_must(kind: str) -> None:
    late = 0.3 if kind in plans.SHARES else math.inf
    plan = plans.Plan(1, 300, 1, 1, 8.0, None, (plans.Fault(kind, 250, 0, 1, 0.0),), late)
    assert runs.run(plan).problems == ()


def test_process_0_looks_less_often_when_it_waits_for_long() -> None:
    kinds = ("never", "stuck")  # the others wait for the arrival, or at a meeting
    same = [plans.Plan(1, 2, 1, 1, 300.0, None, (plans.Fault(kind, 1, 0, 1, 0.0),)) for kind in kinds]
    assert [runs.run(plan).problems for plan in same] == [(), ()]
    for mutation in mutations.LOOKS_TOO_OFTEN:
        with mutations.applied(mutation):
            assert any("messages" in str(runs.run(plan).problems) for plan in same)


def test_without_a_defect_nothing_is_found() -> None:
    with mutations.applied(mutations.CONTROL):
        assert not list(runs.failing(range(150)))


def test_a_process_that_leaves_as_a_meeting_ends_does_not_keep_the_others_waiting_at_the_next() -> None:
    fault = plans.Fault("interrupt meeting", 2, 0, 1, 4.0)
    same = [plans.Plan(seed, 3, 1, 2, 8.0, None, (fault,)) for seed in range(400)]
    assert [plan.seed for plan in same if runs.run(plan).problems] == []
    with mutations.applied(mutations.UNNOTICED_DEPARTURE):
        assert any("waits" in str(runs.run(plan).problems) for plan in same)


def test_process_0_tells_also_those_without_a_reply_when_it_leaves() -> None:
    def plan(seed: int) -> plans.Plan:
        fault = plans.Fault("interrupt arrival", 0, 0, 1, 1.6 + seed % 25 / 10)
        return plans.Plan(seed, 16, 1, 0, 4.0, None, (fault,))

    assert [seed for seed in range(50) if runs.run(plan(seed)).problems] == []
    with mutations.applied(mutations.SOME_WITHOUT_REPLY):
        assert any("names an innocent process" in str(runs.run(plan(seed)).problems) for seed in range(50))


@pytest.mark.parametrize(
    "mutation",
    [mutations.ONLY_OWN_DECISION_TOLD, mutations.NEXT_RESTORE_TOLD, mutations.OUTSIDE_UNCOUNTED],
    ids=lambda mutation: mutation.name,
)
def test_process_0_may_leave_after_another_one_while_it_opens_a_session(mutation: mutations.Mutation) -> None:
    def plan(seed: int) -> plans.Plan:
        times = (1.5 + seed % 40 / 40, 1.6 + seed * 7 % 60 / 40)
        faults = tuple(plans.Fault("interrupt arrival", 1 - i, 0, 1, seconds) for i, seconds in enumerate(times))
        return plans.Plan(seed, (16, 8, 4)[seed % 3], 2, 0, 4.0, None, faults)

    assert [seed for seed in range(100) if runs.run(plan(seed)).problems] == []
    with mutations.applied(mutation):
        assert any(runs.run(plan(seed)).problems for seed in range(100))


def test_process_0_does_not_wait_for_a_report_while_the_others_wait_for_it_at_the_next_restore() -> None:
    crash = plans.Fault("crash", 1, 0, 1, 0.2)
    same = [plans.Plan(seed, 3, 2, 0, 2.0, None, (crash,)) for seed in range(30)]
    assert [plan.seed for plan in same if runs.run(plan).problems] == []
    with mutations.applied(mutations.LONG_WAIT_FOR_REPORTS):
        assert any("does not name the culprit: process 0" in str(runs.run(plan).problems) for plan in same)


def test_a_silent_service_does_not_prolong_the_limit_in_all() -> None:
    plan = plans.Plan(0, 3, 1, 1, 8.0, 4.0, (plans.Fault("silence", 1, 0, 1, 30.0),))
    assert runs.run(plan).problems == ()
    with mutations.applied(mutations.SILENCE_WITHOUT_LIMIT):
        assert "longer than the limit in all" in runs.run(plan).problems[0]


def test_a_process_that_was_stopped_for_long_ends_with_the_others() -> None:
    pause = plans.Fault("pause", 1, 0, 1, 40.0)
    same = [plans.Plan(seed, 3, 1, 1, 8.0, None, (pause,)) for seed in range(60)]
    assert [plan.seed for plan in same if runs.run(plan).problems] == []
    with mock.patch.object(processes, "STOPPED", 1000.0):
        assert any("gives up a service that answers" in str(runs.run(plan).problems) for plan in same)


def test_a_stop_of_process_0_that_is_longer_than_the_limit_makes_no_restore_fail() -> None:
    faults = (plans.Fault("pause", 0, 0, 1, 10.0), plans.Fault("slow", 1, 0, 1, 0.0))
    same = [plans.Plan(seed, 3, 1, 1, 4.0, None, faults) for seed in range(30)]

    def some_fail() -> bool:
        return any(record.error for plan in same for record in runs.run(plan).records)

    assert not some_fail()
    with mutations.applied(mutations.STOPS_COUNT):
        assert some_fail()


@pytest.mark.parametrize("stuck", [(1, 2, 3), (0, 1, 2), (0, 2, 3)])
def test_one_process_reads_in_place_of_all_others(stuck: tuple[int, ...]) -> None:
    faults = tuple(plans.Fault("stalled share", process, 0, 1, 0.0) for process in stuck)
    assert not runs.run(plans.Plan(0, 4, 1, 2, 8.0, None, faults, late=0.3)).problems


def test_a_failing_plan_is_made_smaller() -> None:
    fault = plans.Fault("error", 1, 0, 1, 1.0)
    harmless = plans.Fault("slow calls", 2, 1, 1, 1.0)
    plan = plans.Plan(1, 5, 3, 2, 4.0, None, (harmless, fault))
    mutation = next(each for each in mutations.MUTATIONS if each.name == "an arrival stays when it is over")
    with mutations.applied(mutation):
        smallest = runs.shrink(plan)
    assert smallest.problems
    assert smallest.trace
    assert (smallest.plan.processes, smallest.plan.restores, smallest.plan.faults) == (2, 1, ())


def test_processes_of_a_failing_plan_are_renumbered() -> None:
    faults = (plans.Fault("never", 5, 0, 1, 1.0), plans.Fault("error", 7, 0, 1, 1.0))
    plan = plans.Plan(1, 8, 1, 1, 4.0, None, faults)
    mutation = next(
        each for each in mutations.MUTATIONS if each.name == "those who wait are not told that a process has given up"
    )
    with mutations.applied(mutation):
        smallest = runs.shrink(plan)
    assert smallest.problems
    assert (smallest.plan.processes, [fault.process for fault in smallest.plan.faults]) == (3, [1])


def test_the_same_seed_makes_the_same_run() -> None:
    first, second = (runs.run(plans.random_plan(3), tracing=True) for _ in range(2))
    assert first.trace == second.trace
