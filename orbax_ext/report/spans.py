"""A piece of time that a process spent on one thing. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """What a process did from `start` to `end`, in seconds since its restore began."""

    phase: str  # "describe", "plan", "compile", "connect", "read", "exchange", "wait", "verify"
    start: float
    end: float
    group: int | None = None  # which group of leaves, counted from 0
    bytes: int = 0  # in memory, by the plan: read, or received from other processes
    waited_for: int | None = None  # the process that came last to a meeting
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what is not known."""
        found: dict[str, Any] = {"phase": self.phase, "start": round(self.start, 6), "end": round(self.end, 6)}
        if self.group is not None:
            found["group"] = self.group
        if self.bytes:
            found["bytes"] = self.bytes
        if self.waited_for is not None:
            found["waited_for"] = self.waited_for
        if self.note:
            found["note"] = self.note
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Span:
        return cls(
            str(data["phase"]),
            float(data["start"]),
            float(data["end"]),
            _int_or_none(data.get("group")),
            int(data.get("bytes", 0)),
            _int_or_none(data.get("waited_for")),
            str(data.get("note", "")),
        )


def seconds_by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """How long a process was at each phase; groups that are read at the same time count once."""
    found: dict[str, float] = {}
    until: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        new = span.end - max(span.start, until.get(span.phase, span.start))
        found[span.phase] = found.get(span.phase, 0.0) + max(0.0, new)
        until[span.phase] = max(span.end, until.get(span.phase, span.end))
    return found


def longest(spans: Iterable[Span], most: int) -> tuple[Span, ...]:
    """At most so many spans, in their order: the shortest are left out."""
    listed = sorted(spans, key=lambda span: span.start)
    kept = sorted(range(len(listed)), key=lambda at: -listed[at].seconds)[:most]
    return tuple(listed[at] for at in sorted(kept))


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)
