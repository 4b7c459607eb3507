"""The spans of all processes side by side: lanes, who waited for whom, the critical path, trace events. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax_ext import text
from orbax_ext.report.report import RestoreReport
from orbax_ext.report.spans import Span, waits_by_process

Lanes = Mapping[int, tuple[Span, ...]]  # by process; times count from the moment when the first process began

_CLOSE = 0.002  # seconds that do not matter: meetings end a little earlier on one process than on another
_MOST_STEPS = 10_000  # of a path: a bound for reports in which processes seem to wait for each other in a circle
_SHORT = 0.001  # seconds; a shorter wait gets no arrow


@dataclasses.dataclass(frozen=True)
class PathStep:
    """A part of the critical path: if it had been shorter, the restore would have been shorter."""

    process: int
    span: int  # its number in the process's lane
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class WaitedFor:
    """How long other processes waited at meetings for a process that came last."""

    process: int
    seconds: float  # the sum over all processes that waited
    waiters: int


def make_lanes(report: RestoreReport) -> Lanes:
    """Returns the spans of each process, with their times on one clock."""
    began = min(member.started for member in report.members.values())
    lanes = {}
    for process, member in sorted(report.members.items()):
        late = member.started - began
        spans = [dataclasses.replace(span, start=span.start + late, end=span.end + late) for span in member.spans]
        lanes[process] = tuple(sorted(spans, key=lambda span: span.start))
    return lanes


def most_waited_for(lanes: Lanes) -> list[WaitedFor]:
    """Returns the processes that others waited for, those that cost most first."""
    waits: dict[int, list[float]] = {}  # by the process that came last, the seconds of each process that waited
    for process, spans in lanes.items():
        for last, seconds in waits_by_process(process, spans).items():
            waits.setdefault(last, []).append(seconds)
    totals = [WaitedFor(last, sum(seconds), len(seconds)) for last, seconds in waits.items()]
    return sorted(totals, key=lambda wait: (-wait.seconds, wait.process))


def critical_path(lanes: Lanes) -> list[PathStep]:
    """Returns the chain of work that decided how long the restore took, from its beginning to its end.

    The chain is found backwards: from the span that ended last to the one before it on the same process and, where that
    process waited at a meeting, to the process that came last to the meeting.
    """
    ends = [(span.end, process) for process, spans in lanes.items() for span in spans]
    if not ends:
        return []
    at, process = max(ends)
    path: list[PathStep] = []
    for _ in range(_MOST_STEPS):
        number = _latest(lanes[process], at)
        if number is None:
            break
        span = lanes[process][number]
        if span.phase != "wait":
            path.append(PathStep(process, number, span.start, min(span.end, at)))
        elif span.waited_for is not None and span.waited_for in lanes and span.waited_for != process:
            at, process = _arrival(lanes[span.waited_for], span, at), span.waited_for
            continue
        at = span.start
    return path[::-1]


def trace_events(report: RestoreReport) -> dict[str, Any]:
    """Returns the timeline as Chrome's trace events, for Perfetto and chrome://tracing."""
    lanes = make_lanes(report)
    critical = {(step.process, step.span) for step in critical_path(lanes)}
    hosts = {process: member.host for process, member in report.members.items()}
    events: list[dict[str, Any]] = []
    for process, spans in lanes.items():
        title = text.process(process, hosts)
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}})
        events.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        events += [
            {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in enumerate(("work", "exchange"))
        ]
        events += [_event(process, span, (process, number) in critical) for number, span in enumerate(spans)]
    return {"traceEvents": [*events, *_arrows(lanes)], "displayTimeUnit": "ms"}


def _event(process: int, span: Span, critical: bool) -> dict[str, Any]:
    details = {name: value for name, value in span.to_dict().items() if name not in ("phase", "start", "end")}
    return {
        "ph": "X",
        "pid": process,
        "tid": int(span.phase == "exchange"),  # a thread of its own, because it overlaps with reading
        "name": span.title,
        "cat": span.phase + (",critical" if critical else ""),
        "ts": _microseconds(span.start),
        "dur": _microseconds(span.end) - _microseconds(span.start),
        "args": {**details, **({"critical path": True} if critical else {})},
    }


def _arrows(lanes: Lanes) -> Iterator[dict[str, Any]]:
    """Yields an arrow, in two events, from each process that came last to each process that waited for it."""
    number = 0
    for process, spans in lanes.items():
        for span in spans:
            last = span.waited_for
            if last is None or last == process or last not in lanes or span.seconds < _SHORT:
                continue
            number += 1
            common = {"cat": "wait", "name": "waited for", "id": number, "tid": 0}
            arrival = max(span.start, _arrival(lanes[last], span, span.end))
            yield {**common, "ph": "s", "pid": last, "ts": _microseconds(arrival)}
            yield {**common, "ph": "f", "bp": "e", "pid": process, "ts": _microseconds(span.end)}


def _latest(spans: Sequence[Span], at: float) -> int | None:
    """Returns the number of the span that ended last before a moment, or None if there is none."""
    before = [number for number, span in enumerate(spans) if span.end <= at + _CLOSE and span.start < at - _CLOSE / 2]
    return max(before, key=lambda number: (min(spans[number].end, at), spans[number].start), default=None)


def _arrival(spans: Sequence[Span], wait: Span, at: float) -> float:
    """Returns when the last process, whose spans are given, came to the meeting at which another process had a wait.

    That is where its own wait at this meeting began or, without one, where its work before `at` ended.
    """
    own = [span for span in spans if span.phase == "wait" and span.note == wait.note and span.start <= at]
    if own:
        return min(at, max(span.start for span in own))
    ended = [span.end for span in spans if span.end <= at and span.phase != "wait"]
    return min(at - _CLOSE, max(ended, default=at))


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
