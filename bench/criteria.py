"""The figures that the benchmark has to reach, and whether the results reach them. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from bench.results import Result
from bench.scenarios import scenarios
from bench.strategies import AUTO, BEFORE, PLAIN, SINGLE, SPREAD, STOCK, VERIFIED
from orbax_ext.options import Options
from tools import markdown

PAGE = markdown.Page(
    "bench/results/figures.md",
    "Figures to reach, and whether they are",
    """Computed from the results behind [speed.md](speed.md). Seconds are the median of all runs, "worst" is
    the worst of five or more; what is compared was measured in the same scenario, quiet or busy. A failed run counts as
    infinitely long. Results of unknown commits do not count.""",
    "make bench",
)
# Seconds until the other processes have taken over what a silent one should read. They wait `late_seconds` for each
# share that it had begun: two, as a process reads two groups at a time, and one that `auto` reads directly at the end.
STALL_BELIEVED = 3 * Options().late_seconds
_ENDS = (PLAIN, STOCK, SINGLE, SPREAD)  # what `auto` is compared with
_ENOUGH = 5  # runs, to speak of the worst
_SAME = 1.03  # two measurements of the same thing differ by so much


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure to reach."""

    name: str
    most: float  # the measured figure may be this
    measured: float | None  # None: not measured
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.most

    @property
    def cells(self) -> tuple[str, ...]:
        measured = "-" if self.measured is None else f"{self.measured:.2f}{self.unit}"
        return self.name, f"{self.most:.2f}{self.unit}", measured, _MET[self.met]


_MET = {None: "not measured", True: "met", False: "**not met**"}


class Results:
    """Results by scenario, strategy, and whether the machine was busy."""

    def __init__(self, results: Sequence[Result], busy: bool = False) -> None:
        self._busy = busy
        self._known = {(one.scenario, one.strategy): one for one in results if one.busy == busy and one.commit}

    def value(self, scenario: str, strategy: str, of: Callable[[Result], float]) -> float | None:
        """Returns a figure of a strategy: infinite if a run failed, None if there is no result."""
        result = self._known.get((scenario, strategy))
        if result is None:
            return None
        return math.inf if result.failed else of(result)

    def seconds(self, scenario: str, strategy: str) -> float | None:
        return self.value(scenario, strategy, lambda result: result.seconds)

    def at_one_commit(self, strategy: str, *scenarios: str) -> bool:
        """Returns whether a strategy was measured at the same commit in these scenarios."""
        results = [self._known.get((scenario, strategy)) for scenario in scenarios]
        return None not in results and len({result.commit for result in results if result}) == 1

    def worst(self, scenario: str) -> float | None:
        """Returns the seconds of the worst run of `auto`; None if there are too few runs."""
        result = self._known.get((scenario, AUTO))
        if result is None or (len(result.runs) < _ENOUGH and not result.failed):
            return None
        return math.inf if result.failed else result.worst

    def limit(self, scenario: str) -> float | None:
        return next((one.limit for one in self._known.values() if one.scenario == scenario), None)

    def best(self, scenario: str, strategies: Sequence[str]) -> float | None:
        """Returns the fewest seconds of some strategies; None if one is missing that is measured in the scenario."""
        measured = _SCENARIOS[scenario].measured(self._busy)
        seconds = [self.seconds(scenario, strategy) for strategy in strategies if strategy in measured]
        known = [value for value in seconds if value is not None]
        return min(known) if known and len(known) == len(seconds) else None


_SCENARIOS = {scenario.name: scenario for scenario in scenarios()}


def parts(results: Sequence[Result]) -> tuple[str, ...]:
    """Returns how many figures are met, and a table of all of them for each aim."""
    texts = []
    every: list[Figure] = []
    for title, figures in _aims(results):
        every += figures
        texts.append(f"## {title}")
        texts.append(markdown.table(("figure", "at most", "measured", ""), [figure.cells for figure in figures]))
    met = [figure.met for figure in every]
    return (f"{met.count(True)} met, {met.count(False)} not met, {met.count(None)} not measured.", *texts)


def figures(results: Sequence[Result]) -> Iterator[Figure]:
    """Yields all figures to reach."""
    for _, some in _aims(results):
        yield from some


def _aims(results: Sequence[Result]) -> Iterator[tuple[str, list[Figure]]]:
    quiet, busy = Results(results), Results(results, busy=True)
    yield "`auto` cannot guess wrong", [*_auto(quiet, "")]
    yield "`auto` cannot guess wrong while other programs keep the cores busy", [*_auto(busy, ", busy")]
    yield "What a restore, a leaf and a byte cost", [*_prices(quiet)]
    yield "Slow and stalled readers", [*_take_over(quiet)]


def _auto(known: Results, busy: str) -> Iterator[Figure]:
    """`auto` cannot guess wrong."""
    for name in _SCENARIOS:
        best = known.best(name, _ENDS)
        words = f"`{name}`{busy}: worst `auto` / best of plain, stock, `single`, `spread`"
        yield Figure(words, 1.1, _ratio(known.worst(name), best))
    auto = known.seconds("balanced", AUTO)
    yield Figure(f"`balanced`{busy}: `auto` / limit", 1.25, _ratio(auto, known.limit("balanced")))
    ends = known.best("balanced", (PLAIN, SPREAD))
    yield Figure(f"`balanced`{busy}: `auto` / the faster end alone", 1.0, _ratio(auto, ends))
    dense = _ratio(known.seconds("dense", AUTO), known.seconds("dense", SPREAD))
    yield Figure(f"`dense`{busy}: `auto` / `spread`", _SAME, dense)


def _prices(known: Results) -> Iterator[Figure]:
    """What a restore, a leaf and a byte cost."""
    auto = {name: known.seconds(name, AUTO) for name in _SCENARIOS}
    plain = {name: known.seconds(name, PLAIN) for name in _SCENARIOS}
    yield Figure("`small_leaves`: `auto` / plain", 0.1, _ratio(auto["small_leaves"], plain["small_leaves"]))
    leaves = None
    if known.at_one_commit(AUTO, "many_leaves", "small_leaves"):
        leaves = _ratio(auto["many_leaves"], auto["small_leaves"])
    yield Figure("`many_leaves` / `small_leaves`, four times the leaves: `auto`", 4.4, leaves)
    yield Figure("`demo_state`: `auto` / plain", 1.15, _ratio(auto["demo_state"], plain["demo_state"]))
    yield Figure("`page_cache`: `auto` / plain", 1.0, _ratio(auto["page_cache"], plain["page_cache"]))
    work = [known.value("page_cache", strategy, lambda one: one.processor_seconds) for strategy in (AUTO, PLAIN)]
    yield Figure("`page_cache`: processor seconds of `auto` / plain", 1.15, _ratio(*work))
    for name in ("huge_leaf", "whole_shards", "replica_chunks", "fsdp_dp"):
        yield Figure(f"`{name}`: `auto` / limit", 1.35, _ratio(auto[name], known.limit(name)))
    yield Figure("`dense`: `auto` / limit", 1.1, _ratio(auto["dense"], known.limit("dense")))
    yield Figure("`far_storage`: `auto` / plain", 0.5, _ratio(auto["far_storage"], plain["far_storage"]))
    for name, scenario in _SCENARIOS.items():
        if PLAIN in scenario.strategies:
            best = known.best(name, (PLAIN, STOCK))
            yield Figure(f"`{name}`: `auto` / best of plain, stock", 1.05, _ratio(auto[name], best))
    for name in ("dense", "page_cache"):
        yield Figure(f"`{name}`: `verify=True` / without", 1.1, _ratio(known.seconds(name, VERIFIED), auto[name]))


def _take_over(known: Results) -> Iterator[Figure]:
    """A slow or stalled reader is taken over."""

    def auto(name: str) -> float | None:
        return known.seconds(name, AUTO)

    def before(name: str) -> float | None:
        return known.seconds(name, BEFORE)

    yield Figure("`slow_host`: `auto` / limit", 1.4, _ratio(auto("slow_host"), known.limit("slow_host")))
    yield Figure("`slow_host`: `auto` / the code before", 1.0, _ratio(auto("slow_host"), before("slow_host")))
    most = 1.5 * _SCENARIOS["dead_link"].limit() + STALL_BELIEVED  # known without a measurement
    yield Figure(f"`dead_link`: `auto`, with {STALL_BELIEVED:g} s to believe it", most, auto("dead_link"), " s")
    yield Figure("`jitter`: `auto` / the code before", 1 / 1.5, _ratio(auto("jitter"), before("jitter")))
    yield Figure("`dense`: `auto` / the code before", _SAME, _ratio(auto("dense"), before("dense")))
    read = known.value("dense", SPREAD, lambda one: one.median("storage_bytes") / one.unique_bytes)
    yield Figure("`dense`: bytes read / the state, `spread`", 1.02, read)


def _ratio(value: float | None, of: float | None) -> float | None:
    if value is None or of is None or not of:
        return None
    return 0.0 if math.isinf(of) and not math.isinf(value) else value / of
