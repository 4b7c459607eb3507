"""The middle of a restore: a group of leaves travels while the next ones are read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import jax

from orbax_ext.meeting.session import Session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.options import Options
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer import memory
from orbax_ext.transfer.choice import LEAST_GROUPS, PACE_AFTER, Choice
from orbax_ext.transfer.executor import Execution
from orbax_ext.transfer.read_ahead import ReadAhead, abandon, both
from orbax_ext.transfer.reading import OnDevices


class Pipeline:
    """Reads, meets and exchanges group by group; then reads what is left to be read directly."""

    def __init__(
        self, session: Session, request: Request, restore: Execution, recorder: Recorder, options: Options
    ) -> None:
        self._session = session
        self._restore = restore
        self._recorder = recorder
        self._reading = ReadAhead(self._read, memory.AHEAD[restore.plan.strategy])
        self._direct: dict[int, asyncio.Future[dict[int, jax.Array]]] = {}  # leaves of which the reading has begun
        self._arrays: dict[int, jax.Array] = {}
        self._under_way: asyncio.Future[dict[int, jax.Array]] | None = None
        self._choice: Choice | None = None
        if options.strategy == "auto" and options.storage_gbps is None and self._groups >= LEAST_GROUPS:
            self._choice = Choice(request, restore, recorder, self._reading)

    async def run(self) -> dict[int, jax.Array]:
        """All arrays, by leaf."""
        session, choice = self._session, self._choice
        with self._until_done():
            if self._groups:
                await self._connect_and_choose()
            number = 0
            while number < self._groups:
                # Meet again before each exchange: one process's read error is raised by all.
                phase = f"read group {number + 1} of {self._groups}"
                before = self._finish() if number else self._compile()
                work = both(self._reading.take(number, self._groups), before)
                self._begin_direct_after_groups()
                contributions, _ = await session.together(phase, work)
                if number == 0:  # after the others all come from the meeting at once
                    await session.barrier("single_replica_pre_broadcast")
                self._start(number, contributions)
                number += 1
                if choice is not None and number == PACE_AFTER + 1 < self._groups:
                    choice.decide(await in_thread(session.meet, "pace", choice.found()), done=number)
            directly, _ = await session.together("hand over", both(self._read_direct(), self._finish()))
            return self._arrays | directly

    async def _connect_and_choose(self) -> None:
        """Connects while all are together, so that a late reader harms nobody. Storage is not idle meanwhile."""
        if self._choice is None:
            self._reading.begin(1 + self._reading.ahead, self._groups)
            await self._session.together("connect", self._connect())
            return
        choice = self._choice
        _, told = await self._session.together_telling("measure", choice.look(self._connect()), choice.found)
        choice.decide(told)

    @property
    def _groups(self) -> int:
        return len(self._restore.plan.groups)

    async def _read(self, number: int) -> list[OnDevices]:
        self._begin_direct_after_groups()
        with self._recorder.span("read", group=number):
            return await self._restore.read(self._restore.plan.groups[number])

    async def _compile(self) -> None:
        await self._recorder.timed("compile", self._restore.compile())

    async def _connect(self) -> float:
        return await self._recorder.timed("connect", self._restore.connect(measure=self._choice is not None))

    def _start(self, number: int, contributions: list[OnDevices]) -> None:
        exchange = self._restore.start_exchange(self._restore.plan.groups[number], contributions)
        self._under_way = self._recorder.follow("exchange", exchange, group=number)

    async def _finish(self) -> None:
        """Waits for the exchange that is under way, if one is."""
        if self._under_way is not None:
            self._arrays |= await self._under_way
            self._under_way = None
            if self._choice is not None:
                self._choice.exchanged()

    def _begin_direct(self) -> None:
        """Begins to read what is to be read directly, but for leaves of which that has been begun."""
        new = [leaf for leaf in self._restore.plan.direct if leaf not in self._direct]

        async def read() -> dict[int, jax.Array]:
            with self._reading.busy, self._recorder.span("read"):
                return await self._restore.read_direct(new)

        if new:
            self._direct |= dict.fromkeys(new, asyncio.ensure_future(read()))

    def _begin_direct_after_groups(self) -> None:
        """Begins what is to be read directly once the last group is being read: then storage has room for it."""
        if self._reading.begun >= self._groups:
            self._begin_direct()

    async def _read_direct(self) -> dict[int, jax.Array]:
        self._begin_direct()
        found = await asyncio.gather(*dict.fromkeys(self._direct.values()))
        return {leaf: array for arrays in found for leaf, array in arrays.items()}

    @contextlib.contextmanager
    def _until_done(self) -> Iterator[None]:
        """Gives up what is still being read when the block is left, and lets go of what is the caller's now."""
        try:
            yield
        finally:
            self._reading.give_up(0)
            for task in {*self._direct.values(), *filter(None, [self._under_way])}:
                abandon(task)
            # This object refers to itself: what it holds would stay on the devices until Python collects garbage.
            self._arrays, self._direct, self._under_way = {}, {}, None
