"""Records what one process does during a restore, and when. Only the recorder changes what it has recorded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from orbax_ext.meeting.session import Session
from orbax_ext.plan import MeshInfo, RestorePlan
from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.spans import Span
from orbax_ext.storage import counters

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PlannedRestore:
    """What a restore is going to do."""

    leaves: int
    meshes: tuple[MeshInfo, ...]
    plan: RestorePlan


class Recorder:
    """Collects the spans of one restore. Safe to use from several threads."""

    def __init__(self) -> None:
        self._started = time.time()
        self._began = time.monotonic()  # spans count from here: it goes on evenly if the wall clock is set meanwhile
        self._bytes_before = counters.bytes_read()
        self._requests_before = counters.requests()
        self._spans: list[Span] = []
        self._plan: PlannedRestore | None = None
        self._session: Session | None = None
        self._groups_begun: set[int | None] = set()
        self._groups_read: set[int | None] = set()
        self._other_reports: dict[int, ProcessReport] = {}

    @property
    def started(self) -> float:
        """When this restore began, in seconds since the epoch by process 0's clock, as far as the offset is known."""
        return self._started - (0.0 if self._session is None else self._session.clock_offset)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Finished spans, in the order in which they ended."""
        return tuple(self._spans)

    @property
    def plan(self) -> PlannedRestore | None:
        """The latest plan, or None before there is one."""
        return self._plan

    @property
    def session(self) -> Session | None:
        """The session in which all processes restore together, or None if this process restores alone so far."""
        return self._session

    @property
    def groups_begun(self) -> frozenset[int | None]:
        """Groups that this process has begun to read; None stands for the leaves that are read directly."""
        return frozenset(self._groups_begun)

    @property
    def groups_read(self) -> frozenset[int | None]:
        """Groups that all processes have read: their exchange has begun."""
        return frozenset(self._groups_read)

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

    def attach(self, session: Session) -> None:
        """Notes the session, which knows how far the other processes are and how far apart the clocks are."""
        self._session = session

    def planned(self, leaves: int, meshes: tuple[MeshInfo, ...], plan: RestorePlan) -> None:
        """Notes what was decided; replaces an earlier plan."""
        self._plan = PlannedRestore(leaves, meshes, plan)

    def add_reports(self, reports: Mapping[int, ProcessReport]) -> None:
        """Keeps the reports that other processes have sent to process 0."""
        self._other_reports.update(reports)

    @contextlib.contextmanager
    def span(self, phase: str, *, group: int | None = None) -> Iterator[None]:
        """Records how long a `with` block takes, and shows it in JAX profiles."""
        start = self._now()
        if phase == "read":
            self._groups_begun.add(group)
        elif phase == "exchange":
            self._groups_read.add(group)
        try:
            with jax.profiler.TraceAnnotation(f"orbax_ext.restore.{phase}"):
                yield
        finally:
            self._spans.append(Span(phase, start, self._now(), group))

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
