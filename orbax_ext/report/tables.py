"""Tables and lines that people read in a report. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping

from orbax_ext import text
from orbax_ext.report.process_report import ProcessReport

_MOST_ROWS = 16  # with more processes, a table has the least, the median and the most of each column instead
_PHASES = ("read", "exchange", "wait", "compile", "connect", "verify")
_SUMMARIES: Mapping[str, Callable[[Iterable[float]], float]] = {"least": min, "median": statistics.median, "most": max}


@dataclasses.dataclass(frozen=True)
class Column:
    """A figure of each process: its title, its value and the value as text."""

    title: str
    value: Callable[[ProcessReport], float]
    shown: Callable[[float], str]


class ProcessTable:
    """The figures of processes: a row for each process, a column for each figure."""

    def __init__(self, members: Iterable[ProcessReport]) -> None:
        self._members = sorted(members, key=lambda member: member.process)
        phases = [phase for phase in _PHASES if any(phase in member.seconds for member in self._members)]
        self._columns = (
            *(Column(f"{phase} s", _seconds_in(phase), "{:.2f}".format) for phase in phases),
            Column("total s", lambda member: member.total_seconds, "{:.2f}".format),
            Column("bytes read", lambda member: member.bytes_read, text.size),
            Column("requests", lambda member: member.requests, "{:.0f}".format),
            Column("received", lambda member: member.bytes_received, text.size),
            Column("sent", lambda member: member.bytes_sent, text.size),
            Column("peak memory", lambda member: member.host_peak_bytes, text.size),
        )

    @property
    def head(self) -> list[str]:
        return ["process", *(column.title for column in self._columns), "waited most for"]

    def row(self, member: ProcessReport) -> list[str]:
        figures = [column.shown(column.value(member)) for column in self._columns]
        return [str(member.process), *figures, _waited_most_for(member)]

    def __str__(self) -> str:
        rows = [*map(self.row, self._members)] if len(self._members) <= _MOST_ROWS else self._summary()
        return text.table(self.head, rows, right=range(len(self.head)), indent="")

    def _summary(self) -> list[list[str]]:
        values = [[column.value(member) for member in self._members] for column in self._columns]
        return [
            [name, *(column.shown(choose(of)) for column, of in zip(self._columns, values, strict=True)), ""]
            for name, choose in _SUMMARIES.items()
        ]


def names_by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the names that share a value, by value: leaves by their strategy, for instance."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return names


def direct_reasons(reasons: Mapping[str, str]) -> str:
    """Returns one line for a log that says which leaves are read directly, and why; `reasons` is by leaf name."""
    return "; ".join(f"{text.listing(names)} because {reason}" for reason, names in names_by_value(reasons).items())


def s3_usage(counts: Mapping[str, int]) -> str:
    """Returns requests to and bytes from S3 as text."""
    requests = counts["metadata_requests"] + counts["array_requests"]
    return f"{text.count(requests, 'request')}, {text.size(counts['metadata_bytes'] + counts['array_bytes'])}"


def _seconds_in(phase: str) -> Callable[[ProcessReport], float]:
    return lambda member: member.seconds.get(phase, 0.0)


def _waited_most_for(member: ProcessReport) -> str:
    if not member.waits:
        return "-"
    process, seconds = next(iter(member.waits.items()))
    return f"{process} ({text.seconds(seconds)})"
