"""Records what one process does during a restore, and when. Only the recorder changes what it has recorded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from orbax_ext.meeting.session import Session
from orbax_ext.plan import MeshInfo, RestorePlan, Traffic
from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.spans import Span
from orbax_ext.report.take_over import TakeOver
from orbax_ext.storage import counters

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: to compare all leaves takes long
class PlannedRestore:
    """What a restore is going to do."""

    leaves: int
    meshes: tuple[MeshInfo, ...]
    plan: RestorePlan
    # Where these do not follow from the plan, because hosts send what they have: how each leaf is restored, by name,
    # and the traffic of this process in each exchange.
    strategy: Mapping[str, str] | None = None
    traffic: Sequence[Traffic] | None = None


class Recorder:
    """Collects the spans of one restore. Safe to use from several threads."""

    def __init__(self) -> None:
        self._started = time.time()
        self._began = time.monotonic()  # spans count from here: it goes on evenly if the wall clock is set meanwhile
        self._bytes_before = counters.bytes_read()
        self._requests_before = counters.requests()
        self._again_before = counters.bytes_again()
        self._spans: list[Span] = []
        self._phases_begun: list[tuple[str, int | None]] = []  # the phase and group of all spans, finished or not
        self._other_reports: dict[int, ProcessReport] = {}
        self.plan: PlannedRestore | None = None  # the latest
        self.through_orbax: set[str] = set()  # names of leaves that needed Orbax's own way to read
        self.take_overs: list[TakeOver] = []  # the same on all processes
        self.bytes_unused = 0  # that were read for exchanges that were not held
        self._in_place = 0  # bytes that were read in place of others, or only to measure
        self.session: Session | None = None  # of all processes; None if this process restores alone so far

    @property
    def started(self) -> float:
        """When this restore began, in seconds since the epoch by process 0's clock, as far as the offset is known."""
        return self._started - (0.0 if self.session is None else self.session.clock_offset)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Finished spans, in the order in which they ended."""
        return tuple(self._spans)

    @property
    def groups_begun(self) -> frozenset[int | None]:
        """Groups that this process has begun to read; None stands for the leaves that are read directly."""
        directly = frozenset({None for phase, _ in self._phases_begun if phase == "read directly"})
        return directly | {group for phase, group in self._phases_begun if phase == "read"}

    @property
    def groups_read(self) -> frozenset[int | None]:
        """Groups that all processes have read: their exchange has begun."""
        return frozenset(group for phase, group in self._phases_begun if phase == "exchange")

    @property
    def other_reports(self) -> dict[int, ProcessReport]:
        """On process 0, the reports of other processes that have arrived, by process."""
        return dict(self._other_reports)

    def bytes_read(self) -> int:
        """Returns the number of bytes read from storage since this restore began."""
        return counters.bytes_read() - self._bytes_before

    def requests(self) -> int:
        """Returns the number of requests sent to storage since this restore began."""
        return counters.requests() - self._requests_before

    @property
    def bytes_again(self) -> int:
        """The bytes read in place of others, to measure, or because storage had not answered."""
        return self._in_place + counters.bytes_again() - self._again_before

    def attach(self, session: Session) -> None:
        """Notes the session, which knows how far the other processes are and how far apart the clocks are."""
        self.session = session

    def planned(
        self,
        leaves: int,
        meshes: tuple[MeshInfo, ...],
        plan: RestorePlan,
        strategy: Mapping[str, str] | None = None,
        traffic: Sequence[Traffic] | None = None,
    ) -> None:
        """Notes what was decided; replaces an earlier plan. See `PlannedRestore`."""
        self.plan = PlannedRestore(leaves, meshes, plan, strategy, traffic)

    def unused(self, count: int) -> None:
        """Adds bytes that were read and are not needed."""
        self.bytes_unused += count

    def took_over(self, take_over: TakeOver) -> None:
        """Notes that others read something in place of a process."""
        self.take_overs.append(take_over)

    def again(self, count: int) -> None:
        """Adds bytes that are read although another process has tried to, or would not have to be read."""
        self._in_place += count

    def add_reports(self, reports: Mapping[int, ProcessReport]) -> None:
        """Keeps the reports that other processes have sent to process 0."""
        self._other_reports.update(reports)

    @contextlib.contextmanager
    def span(self, phase: str, *, group: int | None = None, size: int = 0, note: str = "") -> Iterator[None]:
        """Records how long a `with` block takes, and shows it in JAX profiles.

        `size`: its bytes, where they do not follow from the plan.
        """
        start = self._now()
        self._phases_begun.append((phase, group))
        try:
            with jax.profiler.TraceAnnotation(f"orbax_ext.restore.{phase}"):
                yield
        finally:
            self._spans.append(Span(phase, start, self._now(), group, size, note=note))

    async def timed(self, phase: str, work: Awaitable[T], *, group: int | None = None) -> T:
        """Awaits `work`, records how long it takes, and returns its result."""
        with self.span(phase, group=group):
            return await work

    def follow(self, phase: str, work: asyncio.Future[Any], *, group: int | None = None) -> asyncio.Future[Any]:
        """Records a future from now until it is done, whether or not somebody awaits it; returns the future."""
        recording = self.span(phase, group=group)
        recording.__enter__()
        work.add_done_callback(lambda _: recording.__exit__(None, None, None))
        return work

    def waited(self, note: str, seconds: float, last: int | None) -> None:
        """Records a wait that has just ended: `seconds` long, at the meeting `note`, until process `last` arrived."""
        now = self._now()
        self._spans.append(Span("wait", now - seconds, now, waited_for=last, note=note))

    def _now(self) -> float:
        return time.monotonic() - self._began
