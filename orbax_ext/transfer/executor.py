"""Runs reads and programs for the groups of a plan, on this process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import jax
from orbax.checkpoint import type_handlers

from orbax_ext.meeting.threads import result_of
from orbax_ext.plan import Group, Leaf
from orbax_ext.plan.volumes import Loads
from orbax_ext.request import Request
from orbax_ext.transfer import reading
from orbax_ext.transfer.assembly import Assembly
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.boxes import HostBlocks, ReadItem
from orbax_ext.transfer.carriers import Carrier, PlannedLeaves, Replicas, make_carrier
from orbax_ext.transfer.collectives import Exchange, Op, exchange_among
from orbax_ext.transfer.direct_reads import DirectReads, NoteThroughOrbax, Turn, at_once
from orbax_ext.transfer.kept_reads import KeptReads, copies
from orbax_ext.transfer.programs import begin_in_thread, run_in_thread, start_thread
from orbax_ext.transfer.reading import Blocks
from orbax_ext.transfer.release import release
from orbax_ext.transfer.turns import in_turn
from orbax_ext.upstream import runtime
from orbax_ext.upstream.array_handler import without_array_metadata

T = TypeVar("T")


class Executor:
    """Reads, compiles and exchanges groups.

    A function that runs a program does so in a thread, for at most `limit` seconds. Where a peer has died in a
    collective, a program may have to wait for that; the event loop must not.
    """

    def __init__(
        self,
        handler: type_handlers.ArrayHandler,
        request: Request,
        leaves: Sequence[Leaf],
        limit: float,
        through_orbax: set[str] | None = None,
        memory_limit: int | None = None,
    ) -> None:
        """`leaves` are those of the plan, slices included. Adds names of leaves that Orbax reads to `through_orbax`.

        `memory_limit`: bytes per device that may be under way. The plan keeps groups to it, this object other leaves.
        """
        self._reader = without_array_metadata(handler)  # leaves in groups are never typed PRNG keys
        self._leaves = PlannedLeaves(request, leaves)
        self._meshes = request.mesh_infos
        self._loads = Loads(leaves, self._meshes, jax.process_count())
        self._limit = limit
        self._assembly = Assembly(request, self._leaves)
        self._note_through_orbax = note = NoteThroughOrbax(
            self._leaves, set() if through_orbax is None else through_orbax
        )
        self.direct = DirectReads(handler, self._leaves, self._assembly, limit, note, memory_limit)
        self._replicas_of = functools.cache(lambda mesh, axes: Replicas(request.meshes[mesh], axes))
        self._share_bytes: dict[Group, int] = {}
        self.kept = KeptReads()
        # Held here, because `exchange_among` keeps only those that were used last.
        self._exchanges: dict[tuple[int, tuple[str, ...]], Exchange] = {}

    def is_compiled(self, groups: Sequence[Group]) -> bool:
        """Returns whether an earlier restore has compiled the exchanges of these groups."""
        return all(self._exchange(group).is_compiled(self._ops(group)) for group in groups)

    async def compile(self, groups: Sequence[Group]) -> None:
        """Compiles all that these groups need; stops between two groups if it is cancelled."""
        given_up = threading.Event()
        try:
            await self._in_thread(functools.partial(self.compile_now, groups, given_up))
        finally:
            given_up.set()

    def compile_now(self, groups: Sequence[Group], given_up: threading.Event | None = None) -> None:
        """Compiles all that these groups need, in this thread. Later restores find it compiled."""
        with runtime.every_program_cached():
            for group in groups:
                if given_up is not None and given_up.is_set():
                    return
                carriers, exchange = self._carriers(group), self._exchange(group)
                exchange.compile_connection()
                exchange.compile(tuple(carrier.op for carrier in carriers))
                for carrier in carriers:
                    carrier.compile()
                self._assembly.compile(group)

    async def connect(self, groups: Sequence[Group]) -> None:
        """Opens the communicators of these groups.

        All begin before this waits, so that this process takes part in them also if it is given up: the others may be
        inside.
        """
        exchanges = dict.fromkeys(map(self._exchange, groups))
        limit = len(exchanges) * self._limit
        begun = [begin_in_thread(in_turn(exchange.connect, limit)) for exchange in exchanges]
        for connecting in begun:
            await result_of(connecting, "connect", limit)

    def items(self, group: Group) -> list[ReadItem]:
        """Returns what this process reads for an exchange."""
        return [item for carrier in self._carriers(group) for item in carrier.items()]

    async def read(self, group: Group, held: Mapping[int, HostBlocks] | None = None) -> list[DeviceBlocks]:
        """Reads and returns this process's contribution to an exchange, for each bundle of the group.

        `held` are blocks that were read before. What is read here is kept, as far as it is of use without an exchange,
        until the first one begins.
        """
        carriers = self._carriers(group)
        items = [item for carrier in carriers for item in carrier.reads()]
        read = await reading.read_blocks(self._reader, items, held)
        self._note_through_orbax(item.index for item in items if not reading.on_host(read[item.index]))
        self.kept.add([item for item in items if item.index not in (held or {})], read)

        def contributions() -> list[DeviceBlocks]:
            return reading.placed([carrier.contribution(read) for carrier in carriers])

        return await self._in_thread(contributions)

    async def read_whole(
        self,
        group: Group,
        all_read: Callable[[], None] = lambda: None,
        held: Mapping[int, HostBlocks] | None = None,
    ) -> dict[int, jax.Array]:
        """Reads all that this process holds of a group, without an exchange; returns the leaves that are complete.

        `held` are blocks that were read before. `all_read` is called when all is read: from then on it can't be given
        up.
        """
        if kept := self.kept.take(group.leaves):
            held = {**(held or {}), **await self._in_thread(functools.partial(copies, kept))}
        return await self.direct.read_own(group.leaves, all_read, held)

    async def read_direct(
        self, leaves: Collection[int], held: Mapping[int, HostBlocks], turn: Turn = at_once
    ) -> dict[int, jax.Array]:
        """Reads all that this process holds of some leaves, except those whose blocks are `held`."""
        return await self.direct.read(leaves, held, turn)

    def share_bytes(self, group: Group) -> int:
        """Returns the bytes that this process reads of a group that travels."""
        if group not in self._share_bytes:  # groups never change, and may have thousands of leaves
            self._share_bytes[group] = sum(carrier.share_bytes for carrier in self._carriers(group))
        return self._share_bytes[group]

    def whole_bytes(self, leaves: Sequence[int]) -> int:
        """Returns the bytes that this process reads of leaves that are read directly."""
        return self._loads.held(leaves, jax.process_index())

    def extend(self, leaves: Sequence[Leaf]) -> None:
        """Takes slices that were added to the plan."""
        self._leaves.leaves = leaves
        self._loads = Loads(leaves, self._meshes, jax.process_count())

    def start_exchange(
        self, group: Group, contributions: list[DeviceBlocks] | None
    ) -> asyncio.Future[dict[int, jax.Array]]:
        """Starts an exchange; the future has the leaves that it completes. `contributions` is emptied.

        None stands for those of a process that has not read its share. The exchange begins before this returns, so that
        this process takes part in it also if nobody waits for the future.
        """
        self.kept.end()

        def exchange() -> list[DeviceBlocks]:
            try:
                operands = self._zeros(group) if contributions is None else contributions
                release(self._leaves.request(index).arg for index in group.leaves)
            except Exception:
                self._exchange(group).take_part(self._ops(group))  # other processes may be inside
                raise
            return self._run(group, operands)

        exchanging = begin_in_thread(in_turn(exchange, self._limit))

        async def finish() -> dict[int, jax.Array]:
            blocks = await result_of(exchanging, "an exchange", self._limit)
            outputs = iter(blocks)

            def complete() -> dict[int, jax.Array]:
                received: dict[int, Blocks] = {}
                for carrier in self._carriers(group):
                    received.update(carrier.received(outputs))
                arrived = {leaf: blocks for leaf, blocks in received.items() if leaf not in group.dropped}
                return self._assembly.completed_by(arrived, group.later)

            return await self._in_thread(complete)

        return asyncio.ensure_future(finish())

    def take_part(self, group: Group) -> None:
        """Takes part in an exchange that all have agreed on, with zeros, in a thread that nobody waits for.

        For a restore that has failed before its turn: other processes may be inside, and could not leave it.
        """
        start_thread(in_turn(lambda: self._run(group, self._zeros(group)), self._limit))

    def _run(self, group: Group, operands: list[DeviceBlocks]) -> list[DeviceBlocks]:
        """Exchanges a group and waits for it. `operands` is emptied."""
        received = self._exchange(group).run(self._ops(group), operands)
        operands.clear()
        jax.block_until_ready([list(blocks.values()) for blocks in received])
        return received

    def _zeros(self, group: Group) -> list[DeviceBlocks]:
        """Returns the contributions of a process that has read nothing."""
        return reading.placed([carrier.contribution({}) for carrier in self._carriers(group)])

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await run_in_thread(function, self._limit)

    def _carriers(self, group: Group) -> list[Carrier]:
        replicas = self._replicas_of(group.mesh, group.axes)
        return [make_carrier(bundle, self._leaves, replicas) for bundle in group.bundles]

    def _ops(self, group: Group) -> tuple[Op, ...]:
        return tuple(carrier.op for carrier in self._carriers(group))

    def _exchange(self, group: Group) -> Exchange:
        key = (group.mesh, group.axes)
        if key not in self._exchanges:
            self._exchanges[key] = exchange_among(self._replicas_of(*key).table)
        return self._exchanges[key]
