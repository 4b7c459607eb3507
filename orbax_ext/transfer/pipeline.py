"""The effects of a plan, in the order that the handler asks for: a group travels while the next ones are read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import jax
from orbax.checkpoint import type_handlers

from orbax_ext.options import Options
from orbax_ext.plan import RestorePlan
from orbax_ext.plan.memory import AHEAD
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.choice import LEAST_GROUPS, PACE_AFTER, Choice
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.read_ahead import ReadAhead, abandon, both


class Pipeline:
    """Reads and exchanges group by group, and reads other leaves directly. It owns the plan.

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
        self._request = request
        self._recorder = recorder
        self._executor = Executor(handler, request, plan.leaves, options.stall_timeout)
        self._reading = ReadAhead(self._read_group, AHEAD[plan.strategy])
        self._direct: dict[int, asyncio.Future[dict[int, jax.Array]]] = {}  # leaves whose reading has begun
        self._arrays: dict[int, jax.Array] = {}
        self._under_way: asyncio.Future[dict[int, jax.Array]] | None = None
        self._choice: Choice | None = None
        if options.strategy == "auto" and options.storage_gbps is None and len(plan.groups) >= LEAST_GROUPS:
            self._choice = Choice(request.mesh_infos, recorder.bytes_read, self._reading)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reading.give_up(0)
        for task in {*self._direct.values(), *filter(None, [self._under_way])}:
            abandon(task)
        # This object refers to itself: what it holds would stay on the devices until Python collects garbage.
        self._arrays, self._direct, self._under_way = {}, {}, None

    async def connect(self) -> None:
        """Opens communicators while all processes are together, and begins to read the first groups.

        A communicator that is opened later gives a late reader little time (google/orbax #3181).
        """
        connecting = self._executor.connect(self.plan.groups, measure=self._choice is not None)
        work = self._recorder.timed("connect", connecting)
        if self._choice is not None:
            await self._choice.measure(work, len(self.plan.groups))
        else:
            self._reading.begin(1 + self._reading.ahead, len(self.plan.groups))
            await work

    async def read(self, number: int) -> list[DeviceBlocks]:
        """Reads a group, and meanwhile finishes the exchange before it or, for the first group, compiles.

        Returns this process's contribution to the group's exchange.
        """
        before = self._finish_exchange() if number else self._compile()
        work = both(self._reading.take(number, len(self.plan.groups)), before)
        self._begin_direct_after_groups()
        contributions, _ = await work
        return contributions

    def start_exchange(self, number: int, contributions: list[DeviceBlocks]) -> None:
        """Starts a group's exchange; `read` of the next group, or `finish`, waits for its end."""
        exchange = self._executor.start_exchange(self.plan.groups[number], contributions)
        self._under_way = self._recorder.follow("exchange", exchange, group=number)

    async def finish(self) -> list[jax.Array]:
        """Waits for the last exchange and the direct reads; returns all arrays in the order of the request."""
        direct, _ = await both(self._read_direct(), self._finish_exchange())
        arrays = self._arrays | direct
        return [arrays[index] for index in range(len(arrays))]

    def rates(self) -> dict[str, float]:
        """Returns what this process has measured, where `auto` has something to choose."""
        return {} if self._choice is None else self._choice.rates()

    def may_choose_again(self, done: int) -> bool:
        """Returns whether to compare exchanges with what the rates promised. The latest has only been started."""
        return self._choice is not None and done == PACE_AFTER + 1 < len(self.plan.groups)

    def choose(self, rates: Mapping[int, Mapping[str, Any]], done: int = 0) -> None:
        """Moves groups after those `done` to direct reads where that is expected to be faster."""
        if self._choice is None:
            return
        old, self.plan = self.plan, self._choice.decide(self.plan, rates, done)
        self._recorder.planned(len(self._request.leaves), self._request.mesh_infos, self.plan)
        # From the first group that has changed on, what has been read is of other leaves.
        same = [before == after for before, after in zip(old.groups, self.plan.groups, strict=False)]
        self._reading.give_up(same.index(False) if False in same else len(same))

    async def _read_group(self, number: int) -> list[DeviceBlocks]:
        self._begin_direct_after_groups()
        with self._recorder.span("read", group=number):
            return await self._executor.read(self.plan.groups[number])

    async def _compile(self) -> None:
        await self._recorder.timed("compile", self._executor.compile(self.plan.groups))

    async def _finish_exchange(self) -> None:
        if self._under_way is not None:
            self._arrays |= await self._under_way
            self._under_way = None
            if self._choice is not None:
                self._choice.exchanged()

    def _begin_direct_after_groups(self) -> None:
        """Begins the direct reads once the last group is being read: then storage has room for them."""
        if self._reading.begun >= len(self.plan.groups):
            self._begin_direct()

    def _begin_direct(self) -> None:
        new = [leaf for leaf in self.plan.direct if leaf not in self._direct]

        async def read() -> dict[int, jax.Array]:
            with self._reading.busy, self._recorder.span("read"):
                return await self._executor.read_direct(new)

        if new:
            self._direct |= dict.fromkeys(new, asyncio.ensure_future(read()))

    async def _read_direct(self) -> dict[int, jax.Array]:
        self._begin_direct()
        results = await asyncio.gather(*dict.fromkeys(self._direct.values()))
        return {leaf: array for arrays in results for leaf, array in arrays.items()}
