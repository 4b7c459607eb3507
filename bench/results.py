"""What the benchmark found, as data and as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from bench.scenarios import LIMIT_FORMULA, Scenario


@dataclasses.dataclass(frozen=True)
class Run:
    """One restore by one peer."""

    seconds: float
    exact: bool
    storage_bytes: int  # read by all hosts
    fabric_bytes: int  # received by the host that received most
    peak_bytes: int  # resident above what there was before, of the host with most
    compile_seconds: float
    busy: float  # share of the machine's cores that was in use
    error: str = ""
    report: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """All restores of a scenario by one peer."""

    scenario: str
    peer: str
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
    def spread(self) -> tuple[float, float]:
        return min(run.seconds for run in self.runs), max(run.seconds for run in self.runs)

    @property
    def exact(self) -> bool:
        return all(run.exact for run in self.runs)

    def median(self, field: str) -> float:
        return statistics.median(getattr(run, field) for run in self.runs)


def result(scenario: Scenario, peer: str, runs: Sequence[Run]) -> Result:
    least = scenario.unique_bytes * (scenario.replicas - 1) / scenario.replicas
    share = scenario.host_bytes / scenario.unique_bytes
    return Result(
        scenario.name,
        peer,
        tuple(runs),
        scenario.unique_bytes,
        scenario.host_bytes,
        scenario.limit(),
        least * share,
    )


PEERS = ("plain", "stock", "stock 0.11.33")

COLUMNS = (
    *("way", "seconds", "spread", "x best peer", "x limit", "storage"),
    *("fabric", "memory", "compile s", "cores", "exact"),
)


def table(scenario: Scenario, results: Sequence[Result]) -> str:
    """A Markdown table of one scenario."""
    peers = [found.seconds for found in results if found.peer in PEERS and not found.failed]
    best = min(peers, default=float("nan"))
    lines = [f"**{scenario.name}**: {scenario.about}; {_links(scenario)}; limit {scenario.limit():.2f} s", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for found in results:
        if found.failed:
            lines.append(f"| {found.peer} | {found.failed} |" + " |" * (len(COLUMNS) - 2))
            continue
        low, high = found.spread
        cells = [
            found.peer,
            f"{found.seconds:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{found.seconds / best:.2f}",
            f"{found.seconds / found.limit:.2f}",
            f"{found.median('storage_bytes') / found.unique_bytes:.2f}",
            f"{found.median('fabric_bytes') / found.fabric_least:.2f}",
            f"{found.median('peak_bytes') / found.host_bytes:.2f}",
            f"{found.median('compile_seconds'):.2f}",
            f"{100 * found.median('busy'):.0f} %",
            "yes" if found.exact else "**no**",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


LEGEND = (
    f"seconds: median, with the quickest and the slowest run; x best peer: against the faster of plain Orbax and its "
    f"single-replica handler in the same run; x limit: against what the links allow ({LIMIT_FORMULA}); storage: bytes "
    f"read by all hosts over the state's; fabric: bytes received by a host over (R-1)/R of what it holds; memory: peak "
    f"resident above the start over what a host holds in the end; cores: how busy the machine was."
)


def to_json(results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for found in results:
        summary = {} if found.failed else {"seconds": found.seconds, "exact": found.exact}
        rows.append({**dataclasses.asdict(found), **summary})
    return {"about": about, "results": rows}


def from_json(data: dict[str, Any]) -> list[Result]:
    fields = {field.name for field in dataclasses.fields(Result)}
    return [
        Result(**{**{name: row[name] for name in fields}, "runs": tuple(Run(**run) for run in row["runs"])})
        for row in data["results"]
    ]


def _links(scenario: Scenario) -> str:
    links = scenario.links
    if links.shared:
        return f"{scenario.hosts} hosts, {links.fabric} Mbit/s for all"
    cap = f", {links.storage_total} in all" if links.storage_total else ""
    return f"{scenario.hosts} hosts, storage {links.storage}{cap} and fabric {links.fabric} Mbit/s a host"
