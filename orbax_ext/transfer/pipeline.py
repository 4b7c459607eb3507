"""The effects of a plan, in the order that the handler asks for: a group travels while the next ones are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
from orbax.checkpoint import type_handlers

from orbax_ext.options import Options
from orbax_ext.plan import RestorePlan
from orbax_ext.plan.boundary import Ends, Progress, bytes_of_groups, next_boundary
from orbax_ext.plan.memory import AHEAD
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.rates import LinkRates
from orbax_ext.transfer.read_ahead import BackReads, ReadAhead, abandon, both


class Pipeline:
    """Reads and exchanges group by group from the front, and reads other leaves directly. It owns the plan.

    For strategy `auto` it also reads groups from the back directly, and the boundary between the two moves.
    Used in a `with` block, at the end of which it gives up what is still under way.
    """

    def __init__(
        self,
        handler: type_handlers.ArrayHandler,
        request: Request,
        plan: RestorePlan,
        recorder: Recorder,
        options: Options,
    ) -> None:
        self.plan = plan
        self.ends = Ends(0, len(plan.groups))
        self.connected = False
        self.boundary_moves = options.strategy == "auto"
        self._request = request
        self._recorder = recorder
        self._executor = Executor(handler, request, plan.leaves, options.stall_timeout)
        self._bytes = bytes_of_groups(plan, request.mesh_infos, jax.process_count()) if self.boundary_moves else []
        self._rates = LinkRates(self._bytes)
        self._reading = ReadAhead(self._read_share, AHEAD[plan.strategy], self._rates.storage_busy)
        self._back = BackReads(self._read_directly, self._rates.storage_busy)
        self._direct: asyncio.Future[dict[int, jax.Array]] | None = None
        self._preparing: asyncio.Future[None] | None = None
        self._began = time.monotonic()
        self._read_at_meeting = (0, 0)  # `_read_so_far` at the last meeting
        self._arrays: dict[int, jax.Array] = {}
        self._under_way: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reading.give_up(0)
        self._back.give_up()
        for task in (self._direct, self._under_way, self._preparing):
            if task is not None:
                abandon(task)
        # This object refers to itself: what it holds would stay on the devices until Python collects garbage.
        self._arrays, self._direct, self._under_way = {}, None, None

    @property
    def groups_left(self) -> bool:
        """Whether a group has not begun to travel and is not read directly."""
        return self.ends.front < self.ends.back

    async def connect(self) -> None:
        """Opens communicators while all processes are together; reads go on meanwhile.

        A communicator that is opened later gives a late reader little time (google/orbax #3181).
        """
        self._reading.begin(1 + self._reading.ahead, self.ends.back)
        await self._recorder.timed("connect", self._executor.connect(self.plan.groups[: self.ends.back]))
        self.connected = True

    async def read(self) -> None:
        """Reads this process's share of the next group, and meanwhile finishes the exchange before it.

        Ends when the group's exchange can begin. If the boundary moves, it also ends when all is read that may be read:
        then there is time to move it.
        """
        self._begin()
        self._begin_direct_after_groups()
        ready, everything = map(asyncio.ensure_future, (_ended(self._awaited), self._read_everything()))
        try:
            if self.boundary_moves:
                await asyncio.wait([ready, everything], return_when=asyncio.FIRST_COMPLETED)
                if everything.done() and not ready.done() and self._read_so_far != self._read_at_meeting:
                    return everything.result()
            await ready
        finally:
            abandon(ready)
            abandon(everything)

    def progress(self) -> dict[str, Any]:
        """Returns what this process tells the others at a meeting."""
        if not self.boundary_moves:
            return {}
        self._read_at_meeting = self._read_so_far
        return Progress(
            begun=self._reading.begun,
            direct=self._back.done,
            ready=all(task.done() for task in self._awaited),
            idle=self._reading.idle and self._back.idle,
            waiting=time.monotonic() - self._began,
            storage=self._rates.storage(self._reading.groups_done, self._back.done),
            fabric=self._rates.fabric,
        ).to_json()

    def agree(self, told: Mapping[int, Mapping[str, Any]]) -> bool:
        """Moves the boundary by what all processes have told; returns whether the next exchange begins."""
        if not self.boundary_moves:
            return True
        progress = [Progress.from_json(one) for one in told.values()]
        boundary = next_boundary(self._bytes, self.ends, progress)
        if boundary < self.ends.back:
            self._move(boundary)
        return self.groups_left and all(one.ready for one in progress)

    def start_exchange(self) -> None:
        """Starts the next group's exchange; `read` of the group after it, or `finish`, waits for its end."""
        number = self.ends.front
        exchange = self._executor.start_exchange(self.plan.groups[number], self._reading.take(number))
        finishing = asyncio.ensure_future(self._take_arrays(exchange, number))
        self._under_way = self._recorder.follow("exchange", finishing, group=number)
        self.ends = Ends(number + 1, self.ends.back)

    async def finish(self) -> list[jax.Array]:
        """Waits for the last exchange and the direct reads; returns all arrays in the order of the request."""
        self._begin_direct()
        assert self._direct is not None
        before = [] if self._under_way is None else [self._under_way]
        (back, direct), _ = await both(both(self._back.arrays(), self._direct), asyncio.gather(*before))
        arrays = self._arrays | back | direct
        return [arrays[index] for index in range(len(arrays))]

    def _move(self, boundary: int) -> None:
        front, back = self.ends.front, self.ends.back
        if boundary == front:  # nothing travels any more: what was read for exchanges is not needed
            self._recorder.unused(
                sum(self._bytes[group].share for group in self._reading.groups_done if group >= front)
            )
            self._reading.give_up(front)
        self.ends = Ends(front, boundary)
        self._back.begin(range(back - 1, boundary - 1, -1))
        plan = self.plan.divided(boundary)
        self._recorder.planned(len(self._request.leaves), self._request.mesh_infos, plan)

    def _begin(self) -> None:
        """Begins to read what may be read, and to compile."""
        self._reading.begin(self.ends.front + 1 + self._reading.ahead, self.ends.back)
        if self._preparing is None:
            compiling = self._executor.compile(self.plan.groups)
            self._preparing = asyncio.ensure_future(self._recorder.timed("compile", compiling))

    async def _read_share(self, number: int) -> list[DeviceBlocks]:
        self._begin_direct_after_groups()
        with self._recorder.span("read", group=number):
            return await self._executor.read(self.plan.groups[number])

    async def _read_directly(self, number: int) -> dict[int, jax.Array]:
        with self._recorder.span("read directly", group=number):
            return await self._executor.read_whole(self.plan.groups[number])

    async def _read_everything(self) -> None:
        """Waits until all is read that may be read."""
        while not (self._reading.idle and self._back.idle):
            under_way: list[asyncio.Future[Any]] = [*self._reading.under_way, *self._back.under_way]
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            self._reading.raise_errors()
            self._back.raise_errors()

    @property
    def _read_so_far(self) -> tuple[int, int]:
        return len(self._reading.groups_done), self._back.done

    @property
    def _awaited(self) -> list[asyncio.Future[Any]]:
        """What the next exchange waits for on this process."""
        tasks = (self._reading.task(self.ends.front), self._preparing, self._under_way)
        return [task for task in tasks if task is not None]

    async def _take_arrays(self, exchange: asyncio.Future[dict[int, jax.Array]], number: int) -> None:
        with self._rates.fabric_busy:
            self._arrays |= await exchange
        self._rates.exchanged(number + 1)

    def _begin_direct_after_groups(self) -> None:
        """Begins to read leaves that never travel once the last group is being read: then storage has room for them."""
        if self._reading.begun >= self.ends.back:
            self._begin_direct()

    def _begin_direct(self) -> None:
        async def read() -> dict[int, jax.Array]:
            with self._rates.storage_busy, self._recorder.span("read"):
                return await self._executor.read_direct(list(self.plan.direct))

        if self._direct is None:
            self._direct = asyncio.ensure_future(read())


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Waits for tasks and raises their errors. Can be given up: that cancels none of them."""
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()
