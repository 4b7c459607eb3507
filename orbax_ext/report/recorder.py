"""What one process did during a restore, and when: a list of spans, written down as they end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol, TypeVar

import jax

from orbax_ext.plan import MeshInfo, RestorePlan
from orbax_ext.report.report import ProcessReport
from orbax_ext.report.spans import Span
from orbax_ext.storage import counters

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a restore set out to do."""

    leaves: int
    meshes: tuple[MeshInfo, ...]
    plan: RestorePlan


class News(Protocol):
    """What a recorder wants to know of a session while it lasts."""

    hosts: dict[int, str]

    @property
    def phase(self) -> str: ...
    def bytes_done(self) -> dict[int, int]: ...


class Recorder:
    """Collects the spans of one restore. Safe to use from several threads."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._read_before = counters.bytes_read()
        self._requests_before = counters.requests()
        self.started = time.time()
        self.spans: list[Span] = []
        self.plan: Planned | None = None
        self.begun: set[int | None] = set()  # groups whose reading has begun; None stands for what is read directly
        self.passed: set[int | None] = set()  # groups that all processes have read
        self.session: News | None = None
        self.clock_offset = 0.0  # seconds that this process's wall clock is ahead of process 0's
        self.others: dict[int, ProcessReport] = {}  # on process 0, what the others have handed in

    def now(self) -> float:
        """Seconds since this restore began; evenly, even if the wall clock is set meanwhile."""
        return time.monotonic() - self._began

    def bytes_read(self) -> int:
        """Bytes read from storage since this restore began."""
        return counters.bytes_read() - self._read_before

    def requests(self) -> int:
        """Requests to storage since this restore began."""
        return counters.requests() - self._requests_before

    @contextlib.contextmanager
    def span(self, phase: str, *, group: int | None = None, note: str = "") -> Iterator[None]:
        """Records what a `with` block takes, and shows it in JAX profiles."""
        start = self.now()
        if phase in ("read", "exchange"):
            (self.begun if phase == "read" else self.passed).add(group)
        try:
            with jax.profiler.TraceAnnotation(f"orbax_ext.restore.{phase}"):
                yield
        finally:
            self.spans.append(Span(phase, start, self.now(), group, note=note))

    async def timed(self, phase: str, work: Awaitable[T], *, group: int | None = None, note: str = "") -> T:
        """Records what a piece of work takes."""
        with self.span(phase, group=group, note=note):
            return await work

    def follow(self, phase: str, work: asyncio.Future[Any], *, group: int | None = None) -> asyncio.Future[Any]:
        """Records a future from now until it is done, whoever waits for it; returns it."""
        recording = self.span(phase, group=group)
        recording.__enter__()
        work.add_done_callback(lambda _: recording.__exit__(None, None, None))
        return work

    def waited(self, note: str, seconds: float, last: int | None) -> None:
        """Records that this process has just waited at a meeting until process `last` had come."""
        self.spans.append(Span("wait", self.now() - seconds, self.now(), waited_for=last, note=note))

    def planned(self, leaves: int, meshes: tuple[MeshInfo, ...], plan: RestorePlan) -> None:
        """Notes what was decided; the latest plan counts."""
        self.plan = Planned(leaves, meshes, plan)
