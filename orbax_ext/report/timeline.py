"""What a report's spans tell when they are laid side by side: lanes, who waited for whom, the critical path. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax_ext.report.report import RestoreReport
from orbax_ext.report.spans import Span

Lanes = Mapping[int, tuple[Span, ...]]  # by process; times count from the moment when the first process began

_CLOSE = 0.002  # seconds that do not matter: meetings end a little earlier on one process than on another
_MOST_STEPS = 10_000
_SHORT = 0.001  # waits below this draw no arrow


@dataclasses.dataclass(frozen=True)
class Step:
    """A piece of the critical path: had this been shorter, so had the restore."""

    process: int
    span: int  # its number in the process's lane
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Blame:
    """How long others waited at meetings for one process, which came last."""

    process: int
    seconds: float  # of all who waited, added up
    waiters: int


def lanes(report: RestoreReport) -> Lanes:
    began = min(member.started for member in report.members.values())
    return {
        process: tuple(_shifted(span, member.started - began) for span in sorted(member.spans, key=_start))
        for process, member in sorted(report.members.items())
    }


def blames(found: Lanes) -> list[Blame]:
    """Who was waited for, the most costly first."""
    seconds: dict[int, float] = {}
    waiters: dict[int, set[int]] = {}
    for process, spans in found.items():
        for span in spans:
            if span.waited_for is not None and span.waited_for != process:
                seconds[span.waited_for] = seconds.get(span.waited_for, 0.0) + span.seconds
                waiters.setdefault(span.waited_for, set()).add(process)
    listed = [Blame(process, total, len(waiters[process])) for process, total in seconds.items()]
    return sorted(listed, key=lambda blame: (-blame.seconds, blame.process))


def critical_path(found: Lanes) -> list[Step]:
    """The chain of work that the restore's length comes from, from its beginning to its end.

    Told from the end: what a process did last, before that what it did before, and where it waited at a meeting, what
    the process did that came last.
    """
    ends = [(span.end, process) for process, spans in found.items() for span in spans]
    if not ends:
        return []
    at, process = max(ends)
    path: list[Step] = []
    for _ in range(_MOST_STEPS):
        number = _latest(found[process], at)
        if number is None:
            break
        span = found[process][number]
        if span.phase != "wait":
            path.append(Step(process, number, span.start, min(span.end, at)))
        elif span.waited_for is not None and span.waited_for in found and span.waited_for != process:
            at, process = _came(found[span.waited_for], span, at), span.waited_for
            continue
        at = span.start
    return path[::-1]


def trace_events(report: RestoreReport) -> dict[str, Any]:
    """The timeline as Chrome's trace events, for Perfetto and chrome://tracing."""
    found = lanes(report)
    critical = {(step.process, step.span) for step in critical_path(found)}
    events: list[dict[str, Any]] = []
    for process, spans in found.items():
        title = f"process {process} ({report.members[process].host})"
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}})
        events.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        events += [
            {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in enumerate(("work", "exchange"))
        ]
        for number, span in enumerate(spans):
            events.append(_event(process, span, (process, number) in critical))
    return {"traceEvents": [*events, *_arrows(found)], "displayTimeUnit": "ms"}


def _event(process: int, span: Span, critical: bool) -> dict[str, Any]:
    details = {name: value for name, value in span.to_dict().items() if name not in ("phase", "start", "end")}
    return {
        "ph": "X",
        "pid": process,
        "tid": int(span.phase == "exchange"),  # it overlaps with reading
        "name": span.phase if span.group is None else f"{span.phase} group {span.group + 1}",
        "cat": span.phase + (",critical" if critical else ""),
        "ts": _microseconds(span.start),
        "dur": _microseconds(span.end) - _microseconds(span.start),
        "args": {**details, **({"critical path": True} if critical else {})},
    }


def _arrows(found: Lanes) -> Iterator[dict[str, Any]]:
    """From the process that came last to each that waited for it."""
    number = 0
    for process, spans in found.items():
        for span in spans:
            last = span.waited_for
            if last is None or last == process or last not in found or span.seconds < _SHORT:
                continue
            number += 1
            common = {"cat": "wait", "name": "waited for", "id": number, "tid": 0}
            came = max(span.start, _came(found[last], span, span.end))
            yield {**common, "ph": "s", "pid": last, "ts": _microseconds(came)}
            yield {**common, "ph": "f", "bp": "e", "pid": process, "ts": _microseconds(span.end)}


def _start(span: Span) -> float:
    return span.start


def _shifted(span: Span, by: float) -> Span:
    return dataclasses.replace(span, start=span.start + by, end=span.end + by)


def _latest(spans: Sequence[Span], at: float) -> int | None:
    """The span that had ended last at a moment; None if there was nothing before."""
    before = [number for number, span in enumerate(spans) if span.end <= at + _CLOSE and span.start < at - _CLOSE / 2]
    return max(before, key=lambda number: (min(spans[number].end, at), spans[number].start), default=None)


def _came(spans: Sequence[Span], waited: Span, at: float) -> float:
    """When the last process came to the meeting that another waited at: where its own wait began, or its work ended."""
    own = [span for span in spans if span.phase == "wait" and span.note == waited.note and span.start <= at]
    if own:
        return min(at, max(span.start for span in own))
    ended = [span.end for span in spans if span.end <= at and span.phase != "wait"]
    return min(at - _CLOSE, max(ended, default=at))


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
