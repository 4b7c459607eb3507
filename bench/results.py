"""The benchmark's results as data: what was measured, on which commit, and how calls of the benchmark are merged."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.scenarios import Scenario
from bench.strategies import OTHER_CODE, STRATEGIES
from tools import releases

PACKAGES = ("orbax-checkpoint", "jax", "tensorstore")  # whose versions are recorded
RESULTS = releases.ROOT / "bench" / "results" / "results.json"
GIB = 1 << 30


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
    processor_seconds: float = 0.0  # of the processes of all hosts; 0: not measured
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
    limit: float  # 0: there are no limited links
    fabric_least: float  # bytes that a host must receive if each reads a disjoint share
    busy: bool = False  # another program kept all cores busy
    commit: str = ""  # of the code that was measured

    @property
    def condition(self) -> tuple[str, bool]:
        """What results must have in common to be compared."""
        return self.scenario, self.busy

    @property
    def failed(self) -> str:
        return next((run.error for run in self.runs if run.error), "")

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def fastest(self) -> float:
        return min(run.seconds for run in self.runs)

    @property
    def worst(self) -> float:
        return max(run.seconds for run in self.runs)

    @property
    def exact(self) -> bool:
        return all(run.exact for run in self.runs)

    @property
    def processor_seconds(self) -> float:
        """The median of the processor seconds, for each GiB of the state; 0 if they were not measured."""
        return self.median("processor_seconds") * GIB / self.unique_bytes

    def median(self, field: str) -> float:
        return statistics.median(getattr(run, field) for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The content of results.json: all results, and the machine and packages they were measured with."""

    about: Mapping[str, str]
    results: Sequence[Result]


def result(scenario: Scenario, strategy: str, runs: Sequence[Run], *, busy: bool = False, commit: str = "") -> Result:
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
        busy,
        commit,
    )


def merged(earlier: Iterable[Result], new: Result) -> list[Result]:
    """Returns the results with a new one, without those that must not stand beside it.

    These are an earlier one of the same strategy, all in the same table that measured our code at another commit, and
    those of strategies that there are no more.
    """

    def stays(old: Result) -> bool:
        if old.strategy not in STRATEGIES:
            return False
        if old.condition != new.condition:
            return True
        if old.strategy == new.strategy:
            return False
        return old.commit == new.commit or old.strategy in OTHER_CODE or new.strategy in OTHER_CODE

    return [*filter(stays, earlier), new]


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
            row.get("busy", False),
            row.get("commit", ""),
        )
        for row in data["results"]
    ]


def load(path: pathlib.Path = RESULTS) -> Measured:
    """Returns the results in a file; nothing if there is no such file."""
    if not path.exists():
        return Measured({}, [])
    data = json.loads(path.read_text())
    return Measured(data["about"], from_json(data))
