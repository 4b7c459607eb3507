"""Results of the benchmark of the emergency manager as data, the page that shows them, and which figures are met."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from bench.scenarios import MIB
from tools import markdown, releases

RESULTS = releases.ROOT / "bench" / "results" / "emergency.json"
STOCK, OURS, PLAIN = "stock", "orbax_ext", "plain"
ONE_HOST_LOST = "one_host_lost"

PAGE = markdown.Page(
    "bench/results/emergency.md",
    "Seconds to restore after the loss of hosts, measured",
    """Four hosts with two devices each, dp=4 x tp=2, so that every host holds the whole state. Storage is behind links
    of 80 Mbit/s, the fabric has 1600 Mbit/s a host, and local directories are on the machine's own disk, not shaped.
    "plain" is Orbax's `ArrayHandler`, which reads all from storage, "stock" the emergency manager, and "orbax_ext" the
    same manager after `register()`. "limit" is what the links allow. The median of the runs is shown; "x stock" and "x
    plain" say how many times as fast as those a restore is.""",
    "make bench-emergency",
)


@dataclasses.dataclass(frozen=True)
class Result:
    """Medians of several restores; bytes are those of the host that had most, but `served` those of all."""

    case: str
    about: str
    implementation: str
    seconds: float
    runs: tuple[float, ...]  # seconds of each
    served: float
    received: float
    peak: float
    exact: bool
    limit: float  # seconds that the links need at least; 0 if nothing has to travel
    unique_bytes: int
    host_bytes: int
    commit: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.case, self.implementation


def merged(earlier: Iterable[Result], new: Result) -> list[Result]:
    """Returns the results with a new one, without those that it replaces and those of another state."""
    return [old for old in earlier if old.key != new.key and old.unique_bytes == new.unique_bytes] + [new]


def in_order(results: Sequence[Result], cases: Sequence[str]) -> list[Result]:
    """Returns the results in the order of their cases and implementations."""
    implementations = (PLAIN, STOCK, OURS)
    return sorted(results, key=lambda result: (cases.index(result.case), implementations.index(result.implementation)))


def load(path: pathlib.Path = RESULTS) -> list[Result]:
    """Returns the results in a file; nothing if there is no such file."""
    rows = json.loads(path.read_text())["results"] if path.exists() else []
    return [Result(**{**row, "runs": tuple(row["runs"])}) for row in rows]


def save(results: Sequence[Result], path: pathlib.Path = RESULTS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"results": [dataclasses.asdict(result) for result in results]}, indent=1) + "\n")


HEAD = ("case", "restored by", "seconds", "x stock", "x plain", "x limit", "from storage", "fabric", "memory", "exact")


def row(result: Result, results: Iterable[Result]) -> list[str]:
    """Returns a row of the table; `results` has those that it is compared with."""
    others = _by_key(results)
    compared = [others.get((result.case, STOCK)), others.get((PLAIN, PLAIN))]
    return [
        result.about,
        result.implementation,
        f"{result.seconds:.2f}",
        *("" if other is None else f"{other.seconds / result.seconds:.1f}" for other in compared),
        f"{result.seconds / result.limit:.2f}" if result.limit else "",
        f"{result.served / result.unique_bytes:.2f}",
        f"{result.received / result.host_bytes:.2f}",
        f"{result.peak / result.host_bytes:.2f}",
        "yes" if result.exact else "**no**",
    ]


def parts(results: Sequence[Result]) -> list[str]:
    """Returns what the page shows."""
    commits = ", ".join(sorted({result.commit or "unknown" for result in results}))
    legend = (
        f"State: {results[0].unique_bytes // MIB} MiB. From storage: bytes read by all hosts, relative to the state. "
        "Fabric: bytes received by the host that received most, and memory: peak resident memory above the start, "
        f"both relative to what a host holds in the end. Measured at commit {commits}."
    )
    return [markdown.table(HEAD, [row(result, results) for result in results]), legend, figures_table(results)]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Something that a restore has to reach: the least ratio of two times, each given by its case and restorer."""

    about: str
    least: float  # times as fast
    than: tuple[str, str]  # "limit" stands for what the links allow
    case: str = ONE_HOST_LOST

    def measured(self, results: Iterable[Result]) -> float | None:
        """Returns how many times as fast it is; None if that was not measured."""
        by_key = _by_key(results)
        ours, other = by_key.get((self.case, OURS)), by_key.get(self.than)
        if ours is None:
            return None
        if self.than == LIMIT:
            return ours.limit / ours.seconds if ours.limit else None
        return None if other is None else other.seconds / ours.seconds


LIMIT = ("limit", "limit")
FIGURES = (
    Figure("one host lost: at least 4 times as fast as stock", 4, (ONE_HOST_LOST, STOCK)),
    Figure("one host lost: at least 10 times as fast as plain", 10, (PLAIN, PLAIN)),
    Figure("one host lost: within 1.3 times what the fabric allows", 1 / 1.3, LIMIT),
)


def figures(results: Sequence[Result]) -> list[Figure]:
    """Returns all figures: no case may be slower than stock."""
    cases = {result.case: result.about for result in results if result.implementation == OURS}
    return [
        *FIGURES,
        *(Figure(f"{about}: not slower than stock", 1, (case, STOCK), case) for case, about in cases.items()),
    ]


def figures_table(results: Sequence[Result]) -> str:
    """Returns a table of the figures that are met and those that are not."""
    rows = []
    for figure in figures(results):
        measured = figure.measured(results)
        met = "not measured" if measured is None else "yes" if measured >= figure.least else "**no**"
        rows.append([figure.about, f"{figure.least:.2f}", "" if measured is None else f"{measured:.2f}", met])
    return markdown.table(("figure", "to reach, times as fast", "measured", "met"), rows)


def _by_key(results: Iterable[Result]) -> Mapping[tuple[str, str], Result]:
    return {result.key: result for result in results}
