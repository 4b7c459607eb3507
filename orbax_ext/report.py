"""What a restore did."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from orbax_ext.plan import Leaf, RestorePlan

_last: RestoreReport | None = None


@dataclasses.dataclass
class RestoreReport:
    """One process's account of a restore."""

    process: int
    processes: int
    leaves: int = 0
    strategy: dict[str, str] = dataclasses.field(default_factory=dict)  # leaf name: "single" or "direct: why"
    groups: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by phase
    s3: dict[str, int] = dataclasses.field(default_factory=dict)  # requests and bytes, of metadata and of arrays

    def spent(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def describe(self, leaves: Sequence[Leaf], plan: RestorePlan) -> None:
        self.groups = len(plan.groups)
        self.strategy = {leaves[index].name: f"direct: {reason}" for index, reason in plan.direct.items()}
        for group in plan.groups:
            for bundle in group.bundles:
                self.strategy.update({plan.items[index].name: plan.strategy for index in bundle.leaves})

    def __str__(self) -> str:
        direct = sum(how.startswith("direct") for how in self.strategy.values())
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
        return (
            f"process {self.process} of {self.processes}: {self.leaves} leaves, {self.leaves - direct} broadcast in "
            f"{self.groups} groups, {direct} read the ordinary way; {phases}{self._s3_in_words()}"
        )

    def _s3_in_words(self) -> str:
        if not any(self.s3.values()):
            return ""
        requests = self.s3["metadata_requests"] + self.s3["array_requests"]
        return f"; S3: {requests} requests, {self.s3['metadata_bytes'] + self.s3['array_bytes']} bytes"


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
