"""RestoreReport: what a restore did, and where time and bytes went on each process. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

from orbax_ext import text as text_lib
from orbax_ext.report.process_report import DAMAGE, ProcessReport
from orbax_ext.report.tables import ProcessTable, s3_usage
from orbax_ext.report.take_over import TakeOver

FORMAT = 1  # of the JSON
_MOST_TAKE_OVERS = 8  # that are listed
_EXTRA = ("bytes_unused", "bytes_again")  # of a process: read although the state does not need them
_MOST_MISSING = 16  # processes without a report that are listed

_last: RestoreReport | None = None


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """What a restore did: on process 0 the report of all processes, on another process its own."""

    process: int  # the process that made this report
    processes: int
    members: dict[int, ProcessReport]  # by process
    leaves: int = 0
    groups: int = 0
    strategy: dict[str, str] = dataclasses.field(default_factory=dict)  # leaf name: "single" or "direct: why"
    take_overs: tuple[TakeOver, ...] = ()  # what others read in place of processes; the same on all
    error: str = ""  # why it failed; empty if it did not
    # Leaves that this process read with `ArrayHandler.deserialize`; it read all others with TensorStore alone.
    through_orbax: list[str] = dataclasses.field(default_factory=list)
    served_by: str = ""  # the function of Orbax whose call was taken over; empty if Orbax called our handler itself

    @property
    def own(self) -> ProcessReport:
        """The part of the process that made this report."""
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
        """On process 0, the processes whose reports did not arrive; a failed restore collects none."""
        expected = range(self.processes) if self.process == 0 and not self.error else [self.process]
        return [process for process in expected if process not in self.members]

    @property
    def scope(self) -> str:
        """The processes that this report is about: "process 1 of 4" or "4 processes"."""
        if len(self.members) == 1 and self.processes > 1:
            return f"process {self.process} of {self.processes}"
        return text_lib.count(self.processes, "process")

    def followed_by(self, later: RestoreReport) -> RestoreReport:
        """Returns one report of a restore in two parts, of which the second reads leaves that the first has not read.

        Processes whose report of one part did not arrive are left out: half of a report would look like all of it.
        """
        members = {
            process: member.followed_by(later.members[process], self.groups)
            for process, member in self.members.items()
            if process in later.members
        }
        strategy = {
            name: f"{self.strategy[name]}; {how}" if name in self.strategy else how
            for name, how in later.strategy.items()
        }
        return dataclasses.replace(
            self,
            members=members,
            leaves=max(self.leaves, later.leaves),
            groups=self.groups + later.groups,
            strategy={**self.strategy, **strategy},
            take_overs=(*self.take_overs, *(one.moved(self.groups) for one in later.take_overs)),
            error=self.error or later.error,
            through_orbax=sorted({*self.through_orbax, *later.through_orbax}),
        )

    def to_json(self) -> str:
        members = [member.to_dict() for _, member in sorted(self.members.items())]
        take_overs = [one.to_dict() for one in self.take_overs]
        return json.dumps({"orbax_ext_report": FORMAT, **vars(self), "members": members, "take_overs": take_overs})

    @classmethod
    def from_json(cls, text: str) -> RestoreReport:
        """Returns the report that `to_json` wrote; raises `ValueError` for any other text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a report of orbax_ext: not JSON ({error})") from None
        found = data.get("orbax_ext_report", "nothing") if isinstance(data, dict) else type(data).__name__
        if found != FORMAT:
            raise ValueError(
                f"not a report of orbax_ext in format {FORMAT}: found {found!r} under 'orbax_ext_report'. "
                "Write one with last_report().to_json()."
            )
        try:
            return cls(
                members={member.process: member for member in map(ProcessReport.from_dict, data["members"])},
                strategy={str(name): str(strategy) for name, strategy in data["strategy"].items()},
                take_overs=tuple(map(TakeOver.from_dict, data.get("take_overs", ()))),  # older reports have none
                error=str(data["error"]),
                served_by=str(data.get("served_by", "")),  # older reports do not have it
                through_orbax=[str(name) for name in data.get("through_orbax", [])],
                **{field.name: int(data[field.name]) for field in dataclasses.fields(cls) if field.type == "int"},
            )
        except DAMAGE as error:
            raise ValueError(f"a damaged report of orbax_ext: {type(error).__name__}: {error}") from None

    def headline(self) -> str:
        """Returns one line: the outcome, how much was read, and how long it took."""
        members = self.members.values()
        counts = Counter(strategy.partition(":")[0] for strategy in self.strategy.values())
        strategies = ", ".join(f"{number} {strategy}" for strategy, number in counts.items()) or "nothing planned"
        read = text_lib.size(sum(member.bytes_read for member in members))
        total = text_lib.seconds(max(member.total_seconds for member in members))
        phases = ", ".join(f"{phase} {text_lib.seconds(seconds)}" for phase, seconds in self.seconds.items())
        return (
            f"{'failed' if self.error else 'restored'}: {self.scope}: {text_lib.count(self.leaves, 'leaf')} "
            f"({strategies}) in {text_lib.count(self.groups, 'group')}, {read} read from storage in {total}; {phases}"
        ) + "".join(
            [
                f"; S3: {s3_usage(self.s3)}" if any(self.s3.values()) else "",
                f"; in place of {self.served_by}" if self.served_by else "",
            ]
        )

    def __str__(self) -> str:
        lines = [self.headline(), str(ProcessTable(self.members.values()))]
        if self.missing:
            missing = text_lib.listing(self.missing, _MOST_MISSING)
            lines.append(f"no report from {text_lib.count(len(self.missing), 'process')}: {missing}")
        unused, again = (sum(getattr(member, name) for member in self.members.values()) for name in _EXTRA)
        if unused or again:
            shown = {"for exchanges that were not held": unused, "in place of others or to measure storage": again}
            lines.append(
                "also read: " + ", ".join(f"{text_lib.size(size)} {why}" for why, size in shown.items() if size)
            )
        if self.through_orbax:
            named = text_lib.listing(self.through_orbax)
            lines.append(f"read through Orbax: {text_lib.count(len(self.through_orbax), 'leaf')}: {named}")
        lines += [f"others read {one}" for one in self.take_overs[:_MOST_TAKE_OVERS]]
        if len(self.take_overs) > _MOST_TAKE_OVERS:
            lines.append(f"and {len(self.take_overs) - _MOST_TAKE_OVERS} more in place of others")
        if self.error:
            lines.append(f"error: {self.error.strip().splitlines()[0]}")
        return "\n".join(lines)


def last_report() -> RestoreReport | None:
    """Returns the report of this process's latest restore, or None if there was none."""
    return _last


def publish(report: RestoreReport | None) -> None:
    """Makes a report the one that `last_report` returns."""
    global _last
    _last = report
