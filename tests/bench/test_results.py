"""How results are summed up, merged and shown, and which figures they reach."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from bench import criteria, estimates, results, running, tables
from bench.results import GIB, Result, Run
from bench.scenarios import scenarios
from bench.strategies import STRATEGIES

pytestmark = pytest.mark.once

KNOWN = {scenario.name: scenario for scenario in scenarios()}


def measured(
    scenario: str,
    strategy: str,
    *seconds: float,
    busy: bool = False,
    commit: str = "new",
    error: str = "",
    work: float = 1,
) -> Result:
    runs = [Run(each, True, 2 * KNOWN[scenario].unique_bytes, 0, 0, 0.0, 0.5, work, error) for each in seconds]
    return results.result(KNOWN[scenario], strategy, runs, busy=busy, commit=commit)


def test_a_result_says_its_median_its_worst_and_processor_seconds_for_each_gib() -> None:
    result = measured("dense_half", "auto", 3, 1, 2, 9, 4, work=6)
    assert (result.seconds, result.fastest, result.worst) == (3, 1, 9)
    assert result.processor_seconds == 6 * GIB / (512 << 20)


def test_results_are_the_same_after_they_are_written_and_read() -> None:
    some = [measured("dense", "auto", 1, 2, busy=True), measured("dense", "plain", 0, error="process 0 raised")]
    assert results.from_json(json.loads(json.dumps(results.to_json(some, {})))) == some


def test_a_new_result_replaces_its_own_and_what_other_commits_measured_of_our_code() -> None:
    earlier = [
        measured("dense", "plain", 9, commit="old"),
        measured("dense", "auto before", 8, commit="older"),
        measured("dense", "spread", 7, commit="old"),
        measured("dense", "single", 6),
        measured("dense", "auto", 5),
        measured("dense", "auto", 4, busy=True, commit="old"),
        measured("balanced", "auto", 3, commit="old"),
    ]
    new = measured("dense", "auto", 1)
    assert results.merged(earlier, new) == [*earlier[:2], earlier[3], *earlier[5:], new]
    assert results.merged(earlier, measured("dense", "plain", 1))[:-1] == earlier[1:]


def test_results_of_strategies_that_are_gone_are_dropped() -> None:
    gone, new = dataclasses.replace(measured("balanced", "auto", 2), strategy="guess"), measured("dense", "auto", 1)
    assert results.merged([gone], new) == [new]
    assert {result.strategy for result in results.load().results} <= {*STRATEGIES}


@pytest.mark.parametrize(("commit", "ratio"), [("new", 4.0), ("old", None)])
def test_scenarios_are_compared_where_the_same_code_was_measured(commit: str, ratio: float | None) -> None:
    some = [measured("small_leaves", "auto", 2), measured("many_leaves", "auto", 8, commit=commit)]
    (found,) = [one for one in criteria.figures(some) if one.name.startswith("`many_leaves` / `small_leaves`")]
    assert found.measured == ratio


def test_the_page_has_a_summary_and_a_table_for_each_condition() -> None:
    some = [
        measured("dense", "auto", 7.0, 7.2, 9.9, work=4),
        measured("dense", "plain", 27.0, work=8),
        measured("dense", "auto", 12.0, busy=True),
        measured("dead_link", "auto before", 0, error="did not end within 120 s"),
        measured("demo_state", "auto", 0.5),
    ]
    text = "\n".join(tables.parts(some))
    limit = KNOWN["dense"].limit()
    auto = f"| dense | 27.00 | - | - | - | - | 7.20 | 9.90 | {limit:.2f} | {7.2 / limit:.2f} | 8.0 | 4.0 |"
    assert auto in text
    assert "| demo_state | - | - | - | - | - | 0.50 | 0.50 | - | - | - | 32.0 |" in text
    assert text.count("**dense**") == 2
    assert "**dense** (another program keeps all cores busy)" in text
    assert "| auto before | did not end within 120 s |" in text


def figure(some: list[Result], name: str) -> criteria.Figure:
    (found,) = [each for each in criteria.figures(some) if each.name == name]
    return found


def complete(scenario: str, auto: list[float], seconds: float, *, busy: bool = False) -> list[Result]:
    """Returns results of all strategies; all but `auto` take the same."""
    others = [strategy for strategy in KNOWN[scenario].measured(busy) if strategy != "auto"]
    return [
        measured(scenario, "auto", *auto, busy=busy),
        *(measured(scenario, other, seconds, busy=busy) for other in others),
    ]


@pytest.mark.parametrize(("worst", "met"), [(10.9, True), (11.1, False)])
@pytest.mark.parametrize("busy", [False, True])
def test_the_worst_auto_is_compared_with_the_best_of_the_others(worst: float, met: bool, busy: bool) -> None:
    name = f"`balanced`{', busy' if busy else ''}: worst `auto` / best of plain, stock, `single`, `spread`"
    some = complete("balanced", [5, 6, 5, 5, worst], 10, busy=busy)
    assert figure(some, name).met is met
    assert figure([one for one in some if one.strategy != "spread"], name).met is None
    assert figure(complete("balanced", [5, 6, 5, 5, worst], 10, busy=not busy), name).met is None
    assert figure(complete("balanced", [5, 6, 5, worst], 10, busy=busy), name).met is None  # too few runs
    assert figure([dataclasses.replace(one, commit="") for one in some], name).met is None


def test_a_failed_run_reaches_nothing_and_one_that_others_fail_is_better_than_they() -> None:
    failed = measured("jitter", "auto", 0, error="process 1 died")
    fine, before = (
        measured("jitter", "auto", 10),
        measured("jitter", "auto before", 0, error="did not end within 120 s"),
    )
    name = "`jitter`: `auto` / the code before"
    assert figure([failed, measured("jitter", "auto before", 9)], name).measured == math.inf
    assert figure([fine, before], name).met is True


@pytest.mark.parametrize("seconds", [14.0, 200.0])
def test_a_dead_link_may_take_its_limit_and_the_time_to_believe_it(seconds: float) -> None:
    (found,) = [
        each
        for each in criteria.figures([measured("dead_link", "auto", seconds)])
        if "dead_link`: `auto`, " in each.name
    ]
    assert found.most == pytest.approx(1.5 * KNOWN["dead_link"].limit() + criteria.STALL_BELIEVED)
    assert found.met is (seconds == 14.0)


def test_every_figure_says_what_it_may_be_at_most_before_anything_is_measured() -> None:
    assert all(math.isfinite(each.most) for each in criteria.figures([]))
    assert not any("nan" in part for part in criteria.parts([]))


def test_the_figures_are_a_table_that_says_what_is_not_met() -> None:
    text = "\n".join(criteria.parts([measured("dense", "auto", 99), measured("dense", "spread", 7)]))
    assert text.startswith("0 met, 3 not met, ")
    assert "| `dense`: `auto` / limit | 1.10x | 14.75x | **not met** |" in text
    assert "| `demo_state`: `auto` / plain | 1.15x | - | not measured |" in text


def test_a_call_runs_auto_five_times_and_the_oldest_release_once_and_never_busy() -> None:
    settings = running.Settings(oldest="python", before=None)
    times = {(s.strategy, s.busy): s.times for s in running.steps(KNOWN["dense"], [False, True], STRATEGIES, settings)}
    assert times[("auto", False)] == times[("auto", True)] == 5
    assert times[("stock 0.11.33", False)] == 1
    assert ("stock 0.11.33", True) not in times
    assert ("auto before", False) not in times
    assert running.steps(KNOWN["dense"], [False], ["auto"], dataclasses.replace(settings, auto_runs=7))[0].times == 7


def test_estimates_take_earlier_results_and_else_the_limit() -> None:
    dense = KNOWN["dense"]
    around = estimates.around(dense)
    guessed = estimates.seconds(dense, "auto", 1, False, [])
    assert guessed == pytest.approx(around + 1.3 * dense.limit(), rel=0.1)
    earlier = [measured("dense", "auto", 50.0)]
    assert estimates.seconds(dense, "auto", 2, False, earlier) == 2 * (around + 50.0)
    assert estimates.seconds(dense, "auto", 1, True, earlier) > around + 50.0
    failed = [measured("dead_link", "auto", 0, error="did not end within 120 s")]
    assert (
        estimates.seconds(KNOWN["dead_link"], "auto", 1, False, failed) == estimates.around(KNOWN["dead_link"]) + 120.0
    )
    assert (estimates.in_words(40), estimates.in_words(720)) == ("40 s", "12 min")


def test_what_has_a_result_at_this_commit_is_not_measured_again() -> None:
    settings = running.Settings(commit="new", auto_runs=2)
    plain, auto = running.steps(KNOWN["dense"], [False], ["auto", "plain"], settings)
    assert (auto.strategy, plain.strategy) == ("auto", "plain")
    assert running.is_done(auto, [measured("dense", "auto", 1, 2)], settings)
    assert running.is_done(auto, [measured("dense", "auto", 0, error="process 1 died")], settings)
    for other in (
        measured("dense", "auto", 1),
        measured("dense", "auto", 1, 2, commit="old"),
        measured("dense", "auto", 1, 2, busy=True),
        measured("balanced", "auto", 1, 2),
    ):
        assert not running.is_done(auto, [other], settings)
    assert running.is_done(plain, [measured("dense", "plain", 1, 2, commit="old")], settings)
    assert running.is_done(plain, [measured("dense", "plain", 80)], settings)  # too long to run again
    assert not running.is_done(plain, [measured("dense", "plain", 1, 2, commit="")], settings)


def test_what_takes_much_longer_than_auto_is_ended_on_busy_cores() -> None:
    dense = KNOWN["dense"]
    assert dense.measured(busy=True)[0] == "auto"
    plain = running.Step(dense, True, "plain", 1)
    auto = measured("dense", "auto", 20.0, 30.0, busy=True)
    assert running.most_seconds(plain, [auto]) == estimates.most_busy(30.0) < dense.time_limit
    for done in ([], [measured("dense", "auto", 30.0)], [measured("dense", "auto", 0, busy=True, error="died")]):
        assert running.most_seconds(plain, done) == dense.time_limit
    for step in (dataclasses.replace(plain, busy=False), dataclasses.replace(plain, strategy="auto")):
        assert running.most_seconds(step, [auto]) == dense.time_limit
