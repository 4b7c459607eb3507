"""Tables and lines that people read in a report. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from orbax_ext import text
from orbax_ext.report.process_report import ProcessReport

_MOST_ROWS = 16  # with more processes, a table has the least, the median and the most of each column instead
_PHASES = ("read", "read directly", "exchange", "wait", "compile", "connect", "verify")
# The columns after the phases: the title, the attribute of a ProcessReport, and the attribute's value as text.
_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "total s": ("total_seconds", "{:.2f}".format),
    "bytes read": ("bytes_read", text.size),
    "requests": ("requests", "{:.0f}".format),
    "received": ("bytes_received", text.size),
    "sent": ("bytes_sent", text.size),
    "peak memory": ("host_peak_bytes", text.size),
}
_SUMMARIES: Mapping[str, Callable[[Iterable[float]], float]] = {"least": min, "median": statistics.median, "most": max}


class ProcessTable:
    """The figures of processes: a row for each process, a column for each figure."""

    def __init__(self, members: Iterable[ProcessReport]) -> None:
        self._members = sorted(members, key=lambda member: member.process)
        self._phases = [phase for phase in _PHASES if any(phase in member.seconds for member in self._members)]
        self.head = ["process", *(f"{phase} s" for phase in self._phases), *_FIGURES, "waited most for"]

    def row(self, member: ProcessReport) -> list[str]:
        return [str(member.process), *self._shown(self._figures(member)), _waited_most_for(member)]

    def __str__(self) -> str:
        if len(self._members) <= _MOST_ROWS:
            rows = [self.row(member) for member in self._members]
        else:
            columns = [*zip(*map(self._figures, self._members), strict=True)]
            rows = [[name, *self._shown(map(choose, columns)), ""] for name, choose in _SUMMARIES.items()]
        return text.table(self.head, rows, right=range(len(self.head)), indent="")

    def _figures(self, member: ProcessReport) -> list[float]:
        seconds = [member.seconds.get(phase, 0.0) for phase in self._phases]
        return [*seconds, *(getattr(member, name) for name, _ in _FIGURES.values())]

    def _shown(self, figures: Iterable[float]) -> list[str]:
        formats = [*(["{:.2f}".format] * len(self._phases)), *(shown for _, shown in _FIGURES.values())]
        return [shown(figure) for shown, figure in zip(formats, figures, strict=True)]


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


def _waited_most_for(member: ProcessReport) -> str:
    return next((f"{process} ({text.seconds(seconds)})" for process, seconds in member.waits.items()), "-")
