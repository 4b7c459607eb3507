"""Spans: what a process did from one moment to another. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

_TYPES: Any = {"phase": str, "start": float, "end": float, "group": int, "bytes": int, "waited_for": int, "note": str}


@dataclasses.dataclass(frozen=True)
class Span:
    """What a process did from `start` to `end`, in seconds since its restore began."""

    phase: str  # "describe", "plan", "compile", "connect", "read", "read directly", "exchange", "wait", "verify"
    start: float
    end: float
    group: int | None = None  # the number of a group of leaves, counted from 0
    bytes: int = 0  # in memory, read, or received from other processes
    waited_for: int | None = None  # the process that came last to a meeting
    note: str = ""  # for a wait, the meeting; for a read, in place of whom

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def title(self) -> str:
        """The phase, with the group's number counted from 1: "read group 2"."""
        return self.phase if self.group is None else f"{self.phase} group {self.group + 1}"

    def moved(self, seconds: float, groups: int) -> Span:
        """Returns the span that many seconds and groups later."""
        group = None if self.group is None else self.group + groups
        return dataclasses.replace(self, start=self.start + seconds, end=self.end + seconds, group=group)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, without the fields that are not set."""
        data = {**vars(self), "start": round(self.start, 6), "end": round(self.end, 6)}
        return {field.name: data[field.name] for field in dataclasses.fields(self) if data[field.name] != field.default}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Span:
        return cls(**{name: make(data[name]) for name, make in _TYPES.items() if data.get(name) is not None})


def waits_by_process(process: int, spans: Iterable[Span]) -> dict[int, float]:
    """Returns how long a process waited at meetings for each other process that came last, the longest first."""
    seconds: dict[int, float] = {}
    for span in spans:
        if span.waited_for is not None and span.waited_for != process:
            seconds[span.waited_for] = seconds.get(span.waited_for, 0.0) + span.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def seconds_by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """Returns how long a process spent in each phase; time in which spans of a phase overlap counts once."""
    seconds: dict[str, float] = {}
    ends: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        new = span.end - max(span.start, ends.get(span.phase, span.start))
        seconds[span.phase] = seconds.get(span.phase, 0.0) + max(0.0, new)
        ends[span.phase] = max(span.end, ends.get(span.phase, span.end))
    return seconds


def longest(spans: Iterable[Span], most: int) -> tuple[Span, ...]:
    """Returns the `most` longest spans, in the order in which they began."""
    ordered = sorted(spans, key=lambda span: span.start)
    kept = sorted(range(len(ordered)), key=lambda number: -ordered[number].seconds)[:most]
    return tuple(ordered[number] for number in sorted(kept))
