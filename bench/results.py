"""The benchmark's results, as data and as a page."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.scenarios import LIMIT_FORMULA, Scenario, scenarios
from bench.strategies import BASELINES, STOCK_OLDEST
from tools import markdown, releases

PACKAGES = ("orbax-checkpoint", "jax", "tensorstore")  # whose versions are recorded
RESULTS = releases.ROOT / "bench" / "results" / "results.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """One restore with one strategy."""

    seconds: float
    exact: bool
    storage_bytes: int  # read by all hosts
    fabric_bytes: int  # received by the host that received most
    peak_bytes: int  # resident above the start, on the host with most
    compile_seconds: float
    busy: float  # share of the machine's cores that was in use
    error: str = ""
    report: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """All restores of a scenario with one strategy."""

    scenario: str
    strategy: str
    runs: tuple[Run, ...]
    unique_bytes: int
    host_bytes: int
    limit: float
    fabric_least: float  # bytes that a host must receive if each reads a disjoint share

    @property
    def failed(self) -> str:
        return next((run.error for run in self.runs if run.error), "")

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def fastest_and_slowest(self) -> tuple[float, float]:
        return min(run.seconds for run in self.runs), max(run.seconds for run in self.runs)

    @property
    def exact(self) -> bool:
        return all(run.exact for run in self.runs)

    def median(self, field: str) -> float:
        return statistics.median(getattr(run, field) for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The content of results.json: all results, and the machine and packages they were measured with."""

    about: Mapping[str, str]
    results: Sequence[Result]


def result(scenario: Scenario, strategy: str, runs: Sequence[Run]) -> Result:
    least = scenario.unique_bytes * (scenario.replicas - 1) / scenario.replicas
    share = scenario.host_bytes / scenario.unique_bytes
    return Result(
        scenario.name,
        strategy,
        tuple(runs),
        scenario.unique_bytes,
        scenario.host_bytes,
        scenario.limit(),
        least * share,
    )


def to_json(results: Sequence[Result], about: Mapping[str, str]) -> dict[str, Any]:
    rows = []
    for result in results:
        fields = dataclasses.asdict(result)
        summary = {} if result.failed else {"seconds": result.seconds, "exact": result.exact}
        rows.append({"scenario": fields.pop("scenario"), "peer": fields.pop("strategy"), **fields, **summary})
    return {"about": dict(about), "results": rows}


def from_json(data: Mapping[str, Any]) -> list[Result]:
    return [
        Result(
            row["scenario"],
            row["peer"],
            tuple(Run(**run) for run in row["runs"]),
            row["unique_bytes"],
            row["host_bytes"],
            row["limit"],
            row["fabric_least"],
        )
        for row in data["results"]
    ]


def load(path: pathlib.Path = RESULTS) -> Measured:
    data = json.loads(path.read_text())
    return Measured(data["about"], from_json(data))


COLUMNS = (
    *("strategy", "seconds", "fastest-slowest", "x best Orbax", "x limit", "storage"),
    *("fabric", "memory", "compile s", "cores", "exact"),
)


def table(scenario: Scenario, results: Sequence[Result]) -> str:
    """Returns the Markdown table of one scenario."""
    orbax = [result.seconds for result in results if result.strategy in BASELINES and not result.failed]
    best = min(orbax, default=float("nan"))
    title = f"**{scenario.name}**: {scenario.about}; {_links(scenario)}; limit {scenario.limit():.2f} s"
    return f"{title}\n\n{markdown.table(COLUMNS, [_cells(result, best) for result in results])}"


def _cells(result: Result, best: float) -> list[str]:
    if result.failed:
        return [result.strategy, result.failed, *[""] * (len(COLUMNS) - 2)]
    fastest, slowest = result.fastest_and_slowest
    return [
        result.strategy,
        f"{result.seconds:.2f}",
        f"{fastest:.2f}-{slowest:.2f}",
        f"{result.seconds / best:.2f}",
        f"{result.seconds / result.limit:.2f}",
        f"{result.median('storage_bytes') / result.unique_bytes:.2f}",
        f"{result.median('fabric_bytes') / result.fabric_least:.2f}",
        f"{result.median('peak_bytes') / result.host_bytes:.2f}",
        f"{result.median('compile_seconds'):.2f}",
        f"{100 * result.median('busy'):.0f} %",
        "yes" if result.exact else "**no**",
    ]


def page(about: Mapping[str, str]) -> markdown.Page:
    packages = ", ".join(f"{name} {about[name]}" for name in PACKAGES)
    if about["shaped"] == "yes":
        links = "Hosts are network namespaces with links shaped by `tc`; storage is an nginx server behind such a link."
    else:
        links = f"Links are not shaped, all hosts share the machine's disk and loopback: {about['shaped']}."
    return markdown.Page(
        "bench/results/speed.md",
        "Seconds to restore, measured",
        f"""The same checkpoint is restored with each strategy, one after the other, in new processes, on one machine
        ({about["machine"]}; {packages}). {links} Scenarios may have been measured at different times: compare rows of
        one table. "plain" is Orbax's `ArrayHandler`, "stock" its `SingleReplicaArrayHandler`, and the other rows are
        strategies of orbax_ext ("auto, rates given", where it is listed, is an `auto` that chose by given rates).
        "{STOCK_OLDEST}" is run once, the others several times unless that takes more than 75 s. With its defaults the
        stock handler takes seven times the state; where the machine has too little memory for that,
        `broadcast_memory_limit_bytes` is set for it.""",
        "make bench",
    )


def parts(results: Sequence[Result]) -> tuple[str, ...]:
    """Returns the table of each scenario, and the legend."""
    measured = {result.scenario for result in results}
    shown = [scenario for scenario in scenarios() if scenario.name in measured]
    tables = [table(scenario, [result for result in results if result.scenario == scenario.name]) for scenario in shown]
    return (*tables, LEGEND)


LEGEND = f"""\
- seconds: the median, with the fastest and the slowest run
- x best Orbax: relative to the fastest of Orbax's own handlers in the same table
- x limit: relative to what the links allow ({LIMIT_FORMULA})
- storage: bytes read by all hosts, relative to the state
- fabric: bytes received by a host, relative to (R-1)/R of what it holds, with R replicas
- memory: peak resident memory above the start, relative to what a host holds in the end
- cores: how busy the machine was"""


def _links(scenario: Scenario) -> str:
    links = scenario.links
    if links.shared:
        return f"{scenario.hosts} hosts, {links.fabric} Mbit/s for both storage and fabric"
    cap = f" ({links.storage_total} in all)" if links.storage_total else ""
    return f"{scenario.hosts} hosts, storage {links.storage}{cap} and fabric {links.fabric} Mbit/s per host"
