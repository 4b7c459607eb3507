"""What a restore did: where time and bytes went, on each process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from orbax_ext.plan import RestorePlan
from orbax_ext.report import tables
from orbax_ext.report.spans import Span, longest

FORMAT = 1  # of the JSON

_last: RestoreReport | None = None


@dataclasses.dataclass(frozen=True)
class ProcessReport:
    """What one process did in a restore."""

    process: int
    host: str
    started: float  # seconds since the epoch, by process 0's clock as well as it is known
    seconds: dict[str, float]  # by phase; phases overlap
    spans: tuple[Span, ...]  # in the order they began; see `spans_left_out`
    spans_left_out: int = 0  # the shortest ones, where there were too many to send to process 0
    bytes_read: int = 0  # from storage
    requests: int = 0  # to storage
    bytes_received: int = 0  # from other processes, by the plan
    bytes_sent: int = 0  # to other processes, by the plan
    host_peak_bytes: int = 0  # resident, since the process began
    device_peak_bytes: int = 0  # of the fullest device, since the process began; 0 where the backend does not tell
    s3: dict[str, int] = dataclasses.field(default_factory=dict)  # requests and bytes, of metadata and of arrays

    @property
    def total_seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that it waited for each process that came later to a meeting, the longest first."""
        found: dict[int, float] = {}
        for span in self.spans:
            if span.waited_for is not None and span.waited_for != self.process:
                found[span.waited_for] = found.get(span.waited_for, 0.0) + span.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def shortened(self, most: int) -> ProcessReport:
        """The same with the `most` longest spans at most."""
        kept = longest(self.spans, most)
        left_out = self.spans_left_out + len(self.spans) - len(kept)
        return dataclasses.replace(self, spans=kept, spans_left_out=left_out)

    def to_dict(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
            "spans": [span.to_dict() for span in self.spans],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProcessReport:
        numbers = {name: int(data[name]) for name in _NUMBERS}
        return cls(
            host=str(data["host"]),
            started=float(data["started"]),
            seconds={str(phase): float(seconds) for phase, seconds in data["seconds"].items()},
            spans=tuple(Span.from_dict(span) for span in data["spans"]),
            s3={str(name): int(count) for name, count in data["s3"].items()},
            **numbers,
        )


_NUMBERS = (
    "process",
    "spans_left_out",
    "bytes_read",
    "requests",
    "bytes_received",
    "bytes_sent",
    "host_peak_bytes",
    "device_peak_bytes",
)


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did. On process 0 it tells of all processes, on the others of that process alone."""

    process: int  # whose report it is
    processes: int
    members: dict[int, ProcessReport]  # by process
    leaves: int = 0
    groups: int = 0
    strategy: dict[str, str] = dataclasses.field(default_factory=dict)  # leaf name: "single" or "direct: why"
    error: str = ""  # why it failed; empty if it did not

    @property
    def own(self) -> ProcessReport:
        return self.members[self.process]

    @property
    def seconds(self) -> dict[str, float]:
        """Of this process, by phase."""
        return self.own.seconds

    @property
    def s3(self) -> dict[str, int]:
        """Of this process: requests and bytes, of metadata and of arrays; empty if it did not read from S3."""
        return self.own.s3

    @property
    def missing(self) -> list[int]:
        """Processes that this report, if it is process 0's, should tell of and does not."""
        expected = range(self.processes) if self.process == 0 and not self.error else [self.process]
        return [process for process in expected if process not in self.members]

    def to_json(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        members = [member.to_dict() for _, member in sorted(self.members.items())]
        return json.dumps({"orbax_ext_report": FORMAT, **fields, "members": members})

    @classmethod
    def from_json(cls, text: str) -> RestoreReport:
        """The report again; `ValueError` if that is not what the text holds."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not a report of orbax_ext: not JSON ({error})") from None
        if not isinstance(data, dict) or data.get("orbax_ext_report") != FORMAT:
            found = data.get("orbax_ext_report", "nothing") if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"not a report of orbax_ext in format {FORMAT}: found {found!r} under 'orbax_ext_report'. "
                "Write one with last_report().to_json()."
            )
        try:
            members = [ProcessReport.from_dict(member) for member in data["members"]]
            return cls(
                int(data["process"]),
                int(data["processes"]),
                {member.process: member for member in members},
                int(data["leaves"]),
                int(data["groups"]),
                {str(name): str(how) for name, how in data["strategy"].items()},
                str(data["error"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"a damaged report of orbax_ext: {type(error).__name__}: {error}") from None

    def headline(self) -> str:
        """One line."""
        return tables.headline(self)

    def __str__(self) -> str:
        return tables.table(self)


def strategies(plan: RestorePlan) -> dict[str, str]:
    """How each leaf is restored, by name, and why."""
    found = {plan.leaves[index].name: f"direct: {reason}" for index, reason in plan.direct.items()}
    how = f"{plan.strategy}: {plan.because}" if plan.because else plan.strategy
    found.update({plan.leaves[index].name: how for group in plan.groups for index in group.leaves})
    return found


def last_report() -> RestoreReport | None:
    """The report of this process's latest restore, or None if there was none."""
    return _last


def publish(report: RestoreReport | None) -> None:
    global _last
    _last = report


def summarize(direct: Mapping[str, str], most: int = 3) -> str:
    """One line for a log: which leaves are read the ordinary way, and why."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in direct.items():
        by_reason.setdefault(reason, []).append(name)
    parts = []
    for reason, names in by_reason.items():
        shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
        parts.append(f"{shown} because {reason}")
    return "; ".join(parts)
