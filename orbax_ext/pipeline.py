"""The middle of a restore: a group of leaves travels while the next ones are read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

import jax

from orbax_ext import budget, meeting, traffic
from orbax_ext.execution import Execution
from orbax_ext.options import Options
from orbax_ext.plan.cost import Rates, with_cheapest
from orbax_ext.reading import OnDevices
from orbax_ext.recording import Recorder
from orbax_ext.waiting import in_thread
from orbax_ext.wishes import Wishes

F = TypeVar("F")
R = TypeVar("R")

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
        self._measures = options.strategy == "auto" and options.storage_gbps is None
        self._read_seconds = 0.0  # that the first group took
        self._rates: Rates | None = None
        self._ended: list[float] = []  # when each exchange was over

    async def run(self) -> dict[int, jax.Array]:
        """All arrays, by leaf."""
        session, restore, recorder = self._session, self._restore, self._recorder
        arrays: dict[int, jax.Array] = {}
        under_way: asyncio.Future[dict[int, jax.Array]] | None = None

        async def finish() -> None:
            if under_way is not None:
                arrays.update(await under_way)
                self._ended.append(time.monotonic())

        reading = ReadAhead(self._read, self._ahead)
        with reading.until_done():
            # Compile and connect while all are together, so that a late reader harms nobody. Storage is not idle then.
            reading.begin(0, self._groups)
            await session.together("compile", recorder.timed("compile", in_thread(restore.compile, limit=self._limit)))
            connected = restore.connect(self._limit, measure=self._measures)
            fabric = await session.together("connect", recorder.timed("connect", connected))
            number = 0
            while number < self._groups:
                # Meet again before each exchange: one process's read error is raised by all.
                phase = f"read group {number + 1} of {self._groups}"
                taken = reading.take(number, self._groups)
                contributions, _ = await session.together(phase, both(taken, finish()))
                if number == 0:  # after the others all come from the meeting at once
                    await session.barrier("single_replica_pre_broadcast")
                exchange = restore.start_exchange(restore.plan.groups[number], contributions, self._limit)
                under_way = recorder.follow("exchange", exchange, group=number)
                if self._measures:
                    await self._decide(number, fabric)
                    reading.ahead = self._ahead
                    reading.give_up(self._groups)
                number += 1
            reading_direct = recorder.timed("read", restore.read_direct())
            direct, _ = await session.together("hand over", both(reading_direct, finish()))
        return arrays | direct

    @property
    def _groups(self) -> int:
        return len(self._restore.plan.groups)

    @property
    def _ahead(self) -> int:
        """How many groups are read beyond the next; none before it is known whether they will travel."""
        undecided = self._measures and self._rates is None
        return 0 if undecided else budget.AHEAD[self._restore.plan.strategy]

    async def _read(self, number: int) -> list[OnDevices]:
        started = time.monotonic()
        with self._recorder.span("read", group=number):
            found = await self._restore.read(self._restore.plan.groups[number])
        if number == 0:
            self._read_seconds = time.monotonic() - started
        return found

    async def _decide(self, number: int, fabric: float) -> None:
        """Looks, with all processes together, whether the rest had better be read directly."""
        if number == 0:
            brought = traffic.of_process(self._restore.plan, self._request.mesh_infos, jax.process_index())[0].brought
            found = await self._slowest("rates", {"storage": brought / max(self._read_seconds, 1e-6), "fabric": fabric})
            self._rates = Rates(found["storage"], found["fabric"], how="measured")
            self._choose(number + 1)
        elif number == _PACE_TO:
            groups = _PACE_TO - _PACE_FROM
            seconds = self._ended[_PACE_TO - 1] - self._ended[_PACE_FROM - 1]
            found = await self._slowest("pace", {"pace": groups / seconds})
            self._choose(number + 1, 1 / found["pace"])

    def _choose(self, done: int, pace: float | None = None) -> None:
        plan, meshes = self._restore.plan, self._request.mesh_infos
        self._restore.plan = with_cheapest(plan, meshes, jax.process_count(), self._rates, done=done, pace=pace)
        self._recorder.planned(self._request, self._restore.plan)

    async def _slowest(self, phase: str, mine: dict[str, float]) -> dict[str, float]:
        """The least that any process has found; one that had nothing to find it by has no say."""
        told = await in_thread(self._session.meet, phase, mine)
        least = {name: [float(each[name]) for each in told.values() if float(each[name]) > 0] for name in mine}
        return {name: min(values, default=1e9) for name, values in least.items()}


class ReadAhead(Generic[R]):
    """Reads numbered groups in order: the one that is asked for and `ahead` after it."""

    def __init__(self, read: Callable[[int], Awaitable[R]], ahead: int) -> None:
        self.ahead = ahead
        self._read = read
        self._tasks: dict[int, asyncio.Future[R]] = {}

    def begin(self, number: int, groups: int) -> None:
        """Begins to read a group, of `groups` in all, and those after it."""
        for each in range(number, min(number + 1 + self.ahead, groups)):
            if each not in self._tasks:
                self._tasks[each] = asyncio.ensure_future(self._read(each))

    async def take(self, number: int, groups: int) -> R:
        """What was read of a group; those after it are begun, too."""
        self.begin(number, groups)
        return await self._tasks.pop(number)

    @contextlib.contextmanager
    def until_done(self) -> Iterator[None]:
        """Gives up what is still being read when the block is left."""
        try:
            yield
        finally:
            self.give_up(0)

    def give_up(self, number: int) -> None:
        """Reads no more of a group and those after it."""
        for each in [each for each in self._tasks if each >= number]:
            task = self._tasks.pop(each)
            task.cancel()
            # Its error, if it has one, is not news any more.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def both(first: Awaitable[F], second: Awaitable[R]) -> tuple[F, R]:
    """Runs two coroutines at a time and waits for both, also when one fails."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    for result in (one, other):
        if isinstance(result, BaseException):
            raise result
    return one, other  # type: ignore[return-value]
