"""Loads leaves from the hosts' local checkpoints group by group; a group travels while the next ones are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Self

import jax
from absl import logging

from orbax_ext import text
from orbax_ext.plan.holders import Columns, LocalPlan
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer.local_blocks import LocalBlocks
from orbax_ext.transfer.rates import Stopwatch
from orbax_ext.transfer.read_ahead import ReadAhead, abandon, both
from orbax_ext.transfer.relays import RelayExecutor

_AHEAD = 0  # groups that are loaded beyond the next one: more would take the cores from the group that travels
_TRAVELLING = 1  # groups that may be on their way when all meet for the next one


class LocalPipeline:
    """Follows a plan that was made from what all processes have. `gaps` are blocks to read from storage, see `Gaps`.

    Used in a `with` block, at the end of which it waits no longer for what is still under way. It takes part in
    exchanges that all have agreed on even then.
    """

    def __init__(
        self,
        request: Request,
        tables: Mapping[int, Columns],
        blocks: LocalBlocks,
        plan: LocalPlan,
        gaps: Mapping[int, Mapping[int, int]],
        recorder: Recorder,
        limit: float,
        first: int = 0,
    ) -> None:
        """`limit` is in seconds, for each program; `first` is the number of the first group in the report."""
        self._leaves = request.leaves
        self._plan = plan
        self._first = first
        self._blocks = blocks
        self._gaps = gaps
        self._recorder = recorder
        self._executor = RelayExecutor(request, tables, limit)
        self._reading = ReadAhead(self._load_group, _AHEAD, Stopwatch())
        self._under_way: list[asyncio.Future[dict[int, jax.Array]]] = []  # exchanges, in the order of the groups
        self._arrays: dict[int, jax.Array] = {}

    def __enter__(self) -> Self:
        if self._plan.oversized:
            logging.info(
                "orbax_ext: larger than the memory limit allows for one group; each travels in one piece: %s",
                text.listing([self._leaves[index].name for index in self._plan.oversized]),
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._reading.give_up(0)
        for exchange in self._under_way:
            abandon(exchange)
        # This object refers to itself: what it holds would stay on the devices until Python collects garbage.
        self._arrays, self._under_way = {}, []

    async def load(self, number: int) -> None:
        """Loads a group and compiles its programs; before the first one all processes are together, and it connects.

        Meanwhile the group before it travels, so that the link is not idle while all meet and start this one.
        """
        self._reading.begin(number + 1 + self._reading.ahead, len(self._plan.groups))
        before = self._finish_exchanges(_TRAVELLING) if number else self._connect()
        await both(self._reading.task(number), both(before, self._compile(number)))
        self._reading.take(number)

    def start_exchange(self, number: int, damaged: Collection[int]) -> None:
        """Starts a group's exchange, without the leaves that are damaged somewhere."""
        group = self._plan.groups[number].without(damaged)
        if group.relays:
            exchange = self._executor.start_exchange(group, self._blocks.blocks)
            self._under_way.append(self._recorder.follow("exchange", exchange, group=self._first + number))

    async def finish(self) -> None:
        """Waits for the last exchanges, and meanwhile loads the leaves that do not travel."""
        with self._recorder.span("read"):
            await both(self._blocks.load(self._plan.complete, self._gaps), self._finish_exchanges(0))

    def hand_over(self, damaged: Collection[int]) -> dict[int, jax.Array]:
        """Returns all leaves but those that are damaged somewhere or travel with such a leaf."""
        for index in self._plan.complete:
            if index not in damaged:
                self._arrays[index] = self._executor.hand_over(index, self._blocks.blocks.pop(index))
        return self._arrays

    async def _load_group(self, number: int) -> None:
        with self._recorder.span("read", group=self._first + number):
            group = self._plan.groups[number]
            await self._blocks.load(group.leaves, self._gaps, group.loaded)

    async def _connect(self) -> None:
        await self._recorder.timed("connect", self._executor.connect(self._plan.groups))

    async def _compile(self, number: int) -> None:
        await self._recorder.timed("compile", self._executor.compile(self._plan.groups[number]))

    async def _finish_exchanges(self, left: int) -> None:
        """Waits for the oldest exchanges, until at most `left` are under way."""
        while len(self._under_way) > left:
            self._arrays |= await self._under_way[0]
            del self._under_way[0]
