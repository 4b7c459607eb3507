"""The middle of a restore: a group of leaves travels while the next ones are read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

import jax

from orbax_ext import budget, meeting
from orbax_ext.execution import Execution
from orbax_ext.options import Options
from orbax_ext.plan.cost import Rates, with_cheapest
from orbax_ext.reading import OnDevices
from orbax_ext.recording import Recorder
from orbax_ext.waiting import in_thread
from orbax_ext.wishes import Wishes

F = TypeVar("F")
R = TypeVar("R")

_UNDECIDED = 2  # groups: enough to tell how fast storage is
_PACE_FROM, _PACE_TO = 1, 3  # the groups by which it is seen whether the exchange keeps what the rates promise


class Pipeline:
    """Reads, meets and exchanges group by group; then reads what is left to be read directly."""

    def __init__(
        self, session: meeting.Session, request: Wishes, restore: Execution, recorder: Recorder, options: Options
    ) -> None:
        self._session = session
        self._request = request
        self._restore = restore
        self._recorder = recorder
        self._limit = options.stall_timeout
        self._reading = ReadAhead(self._read, budget.AHEAD[restore.plan.strategy])
        self._reading_direct: asyncio.Future[dict[int, jax.Array]] | None = None
        self._direct: list[int] = []  # leaves of which the reading has begun
        self._ended: list[float] = []  # when each exchange was over
        self._fabric = 0.0  # bytes per second, as measured
        # Some groups are begun before it is known whether more should travel. They travel in any case.
        self._measures = options.strategy == "auto" and options.storage_gbps is None and self._groups > _UNDECIDED
        if self._measures:
            self._reading.ahead = _UNDECIDED - 1

    async def run(self) -> dict[int, jax.Array]:
        """All arrays, by leaf."""
        session, restore, recorder, reading = self._session, self._restore, self._recorder, self._reading
        arrays: dict[int, jax.Array] = {}
        under_way: asyncio.Future[dict[int, jax.Array]] | None = None

        async def finish() -> None:
            if under_way is not None:
                arrays.update(await under_way)
                self._ended.append(time.monotonic())

        with self._until_done():
            # Compile and connect while all are together, so that a late reader harms nobody. Storage is not idle then.
            reading.begin(0, self._groups)
            if self._measures:
                await self._measure_and_decide()
            elif self._groups:
                await session.together("compile", self._compile())
                await session.together("connect", self._connect())
            number = 0
            while number < self._groups:
                # Meet again before each exchange: one process's read error is raised by all.
                phase = f"read group {number + 1} of {self._groups}"
                taken = reading.take(number, self._groups)
                self._begin_direct()
                contributions, _ = await session.together(phase, both(taken, finish()))
                if number == 0:  # after the others all come from the meeting at once
                    await session.barrier("single_replica_pre_broadcast")
                exchange = restore.start_exchange(restore.plan.groups[number], contributions, self._limit)
                under_way = recorder.follow("exchange", exchange, group=number)
                number += 1
                if self._measures and number == _PACE_TO + 1:
                    pace = (self._ended[_PACE_TO - 1] - self._ended[_PACE_FROM - 1]) / (_PACE_TO - _PACE_FROM)
                    await self._decide(number, pace)
            arrays |= (await session.together("hand over", both(self._read_direct(), finish())))[0]
        return arrays

    @property
    def _groups(self) -> int:
        return len(self._restore.plan.groups)

    async def _read(self, number: int) -> list[OnDevices]:
        with self._recorder.span("read", group=number):
            return await self._restore.read(self._restore.plan.groups[number])

    async def _compile(self) -> None:
        await self._recorder.timed("compile", in_thread(self._restore.compile, limit=self._limit))

    async def _connect(self) -> float:
        connected = self._restore.connect(self._limit, measure=self._measures)
        return await self._recorder.timed("connect", connected)

    def _begin_direct(self) -> None:
        """Begins what is read directly, once the last group is being read: then storage has room for it."""
        if self._reading_direct is None and self._reading.begun >= self._groups:
            self._direct = list(self._restore.plan.direct)
            reading = self._recorder.timed("read", self._restore.read_direct(self._direct))
            self._reading_direct = asyncio.ensure_future(reading)

    async def _read_direct(self) -> dict[int, jax.Array]:
        self._begin_direct()
        assert self._reading_direct is not None
        later = [leaf for leaf in self._restore.plan.direct if leaf not in set(self._direct)]
        first, rest = await both(self._reading_direct, self._restore.read_direct(later))
        return first | rest

    @contextlib.contextmanager
    def _until_done(self) -> Iterator[None]:
        """Gives up what is still being read when the block is left."""
        try:
            yield
        finally:
            self._reading.give_up(0)
            if self._reading_direct is not None:
                abandon(self._reading_direct)

    # Which way is faster, where that is to be found out.

    async def _measure_and_decide(self) -> None:
        self._fabric, _ = await self._session.together("measure", both(self._connect(), self._reading.arrived(0)))
        await self._decide(_UNDECIDED)
        self._reading.ahead = budget.AHEAD[self._restore.plan.strategy]
        self._reading.begin(0, self._groups)
        self._begin_direct()
        await self._session.together("compile", self._compile())

    async def _decide(self, done: int, pace: float = 0.0) -> None:
        """Looks, with all processes together, whether what is not `done` had better be read directly.

        By the rates of the links; or, once that has been seen, by the seconds that the exchange of a group takes.
        """
        storage = self._recorder.bytes_read() / max(self._reading.busy_seconds, 1e-6)
        mine = {"storage": storage, "fabric": self._fabric, "pace": 1 / pace if pace else 0.0}
        found = await self._slowest(f"rates after {done}", mine)
        rates = Rates(found["storage"], found["fabric"], how="measured")
        meshes, processes = self._request.mesh_infos, jax.process_count()
        each = 1 / found["pace"] if pace else None
        self._restore.plan = with_cheapest(self._restore.plan, meshes, processes, rates, done=done, pace=each)
        self._recorder.planned(self._request, self._restore.plan)
        self._reading.give_up(self._groups)

    async def _slowest(self, phase: str, mine: dict[str, float]) -> dict[str, float]:
        """The least that any process has found; one that had nothing to find it by has no say."""
        told = await in_thread(self._session.meet, phase, mine)
        least = {name: [float(each[name]) for each in told.values() if float(each[name]) > 0] for name in mine}
        return {name: min(values, default=1e9) for name, values in least.items()}


class ReadAhead(Generic[R]):
    """Reads numbered groups in order: the one that is asked for and `ahead` after it."""

    def __init__(self, read: Callable[[int], Awaitable[R]], ahead: int) -> None:
        self.ahead = ahead
        self.begun = 0  # groups of which the reading has begun
        self._read = read
        self._tasks: dict[int, asyncio.Future[R]] = {}
        self._under_way = 0
        self._busy_since = 0.0
        self._busy_before = 0.0

    def begin(self, number: int, groups: int) -> None:
        """Begins to read a group, of `groups` in all, and those after it."""
        for each in range(number, min(number + 1 + self.ahead, groups)):
            if each not in self._tasks:
                self._tasks[each] = asyncio.ensure_future(self._timed(each))
            self.begun = max(self.begun, each + 1)

    async def arrived(self, number: int) -> None:
        """Waits until a group that was begun, and not taken yet, has been read."""
        await asyncio.wait([self._tasks[number]])

    @property
    def busy_seconds(self) -> float:
        """For how long something was being read."""
        return self._busy_before + (time.monotonic() - self._busy_since if self._under_way else 0.0)

    async def take(self, number: int, groups: int) -> R:
        """What was read of a group; those after it are begun, too."""
        self.begin(number, groups)
        return await self._tasks.pop(number)

    async def _timed(self, number: int) -> R:
        if not self._under_way:
            self._busy_since = time.monotonic()
        self._under_way += 1
        try:
            return await self._read(number)
        finally:
            self._busy_before, self._under_way = self.busy_seconds, self._under_way - 1
            self._busy_since = time.monotonic()

    def give_up(self, number: int) -> None:
        """Reads no more of a group and those after it."""
        for each in [each for each in self._tasks if each >= number]:
            abandon(self._tasks.pop(each))


def abandon(task: asyncio.Future[Any]) -> None:
    """Does not wait for a task any more. Its error, if it has one, is not news."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def both(first: Awaitable[F], second: Awaitable[R]) -> tuple[F, R]:
    """Runs two coroutines at a time and waits for both, also when one fails."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    for result in (one, other):
        if isinstance(result, BaseException):
            raise result
    return one, other  # type: ignore[return-value]
