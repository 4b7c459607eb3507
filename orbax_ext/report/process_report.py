"""ProcessReport: what one process did in a restore. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_ext.report.spans import Span, longest, waits_by_process

# What reading damaged data can raise: JSON that is nested too deep or has an infinite number, a field that is absent or
# of another type.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True)
class ProcessReport:
    """What one process did in a restore."""

    process: int
    host: str
    started: float  # seconds since the epoch, by process 0's clock as far as the offset is known
    seconds: dict[str, float]  # by phase; phases overlap
    spans: tuple[Span, ...]  # in the order in which they began; see `spans_left_out`
    spans_left_out: int = 0  # the shortest ones, where there were too many to keep or to send to process 0
    bytes_read: int = 0  # from storage
    bytes_unused: int = 0  # of these, read for an exchange that was not held
    bytes_again: int = 0  # of these, read in place of another process, to measure, or asked for a second time
    requests: int = 0  # to storage
    bytes_received: int = 0  # from other processes, by the plan
    bytes_sent: int = 0  # to other processes, by the plan
    host_peak_bytes: int = 0  # resident, since the process began
    device_peak_bytes: int = 0  # of the fullest device, since the process began; 0 if the backend does not count it
    s3: dict[str, int] = dataclasses.field(default_factory=dict)  # requests and bytes, of metadata and of arrays

    @property
    def total_seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def waits(self) -> dict[int, float]:
        """Seconds that this process waited at meetings for each process that came later, the longest first."""
        return waits_by_process(self.process, self.spans)

    def shortened(self, most: int) -> ProcessReport:
        """Returns the report with its `most` longest spans and the number of those left out."""
        kept = longest(self.spans, most)
        left_out = self.spans_left_out + len(self.spans) - len(kept)
        return dataclasses.replace(self, spans=kept, spans_left_out=left_out)

    def followed_by(self, later: ProcessReport, groups: int) -> ProcessReport:
        """Returns one report of two restores that were parts of one; `groups` is the number of groups in the first."""
        # Clocks of two hosts may differ, and the offset is not known to a part in which this process was alone.
        offset = max(self.total_seconds, later.started - self.started)
        phases = [*self.seconds, *(phase for phase in later.seconds if phase not in self.seconds)]
        return dataclasses.replace(
            self,
            seconds={phase: self.seconds.get(phase, 0.0) + later.seconds.get(phase, 0.0) for phase in phases},
            spans=(*self.spans, *(span.moved(offset, groups) for span in later.spans)),
            host_peak_bytes=max(self.host_peak_bytes, later.host_peak_bytes),
            device_peak_bytes=max(self.device_peak_bytes, later.device_peak_bytes),
            s3={name: self.s3.get(name, 0) + later.s3.get(name, 0) for name in {**self.s3, **later.s3}},
            **{name: getattr(self, name) + getattr(later, name) for name in _SUMS},
        )

    def to_dict(self) -> dict[str, Any]:
        seconds = {phase: round(seconds, 6) for phase, seconds in self.seconds.items()}
        return {**vars(self), "seconds": seconds, "spans": [span.to_dict() for span in self.spans]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProcessReport:
        """Returns the report that `to_dict` wrote; raises one of `DAMAGE` for anything else."""
        return cls(
            host=str(data["host"]),
            started=float(data["started"]),
            seconds={str(phase): float(seconds) for phase, seconds in data["seconds"].items()},
            spans=tuple(Span.from_dict(span) for span in data["spans"]),
            s3={str(name): int(count) for name, count in data["s3"].items()},
            **{name: int(data.get(name, 0)) for name in _LATER},
            **{name: int(data[name]) for name in _COUNTS},
        )


_LATER = ("bytes_unused", "bytes_again")  # older reports do not have these
_COUNTS = [
    field.name for field in dataclasses.fields(ProcessReport) if field.type == "int" and field.name not in _LATER
]
_SUMS = ("spans_left_out", "bytes_read", "bytes_unused", "bytes_again", "requests", "bytes_received", "bytes_sent")
