"""Runs reads and programs for the groups of a plan, on this process."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import jax
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan import Group, Leaf
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer import reading
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.carriers import Carrier, PlannedLeaves, Replicas, is_local, make_carrier
from orbax_ext.transfer.collectives import Exchange, exchange_among
from orbax_ext.transfer.programs import Assembler, Words, make_assembler
from orbax_ext.upstream.array_handler import without_array_metadata

T = TypeVar("T")


class Executor:
    """Reads, compiles and exchanges groups.

    A function that runs a program does so in a thread, for at most `limit` seconds. Where a peer has died in a
    collective, a program may have to wait for that; the event loop must not.
    """

    def __init__(
        self, handler: type_handlers.ArrayHandler, request: Request, leaves: Sequence[Leaf], limit: float
    ) -> None:
        """`leaves` are those of the plan, slices included."""
        self._handler = handler
        self._reader = without_array_metadata(handler)  # leaves in groups are never typed PRNG keys
        self._request = request
        self._leaves = PlannedLeaves(request, leaves)
        self._limit = limit
        self._assembly = _Assembly(self._leaves)
        self._replicas_of = functools.cache(lambda mesh, axes: Replicas(request.meshes[mesh], axes))
        # Held here, because `exchange_among` keeps only those that were used last.
        self._exchanges: dict[tuple[int, tuple[str, ...]], Exchange] = {}

    async def compile(self, groups: Sequence[Group]) -> None:
        def compile_all() -> None:
            for group in groups:
                carriers = self._carriers(group)
                self._exchange(group).compile(tuple(carrier.op for carrier in carriers))
                for carrier in carriers:
                    carrier.compile()
                self._assembly.compile(group.leaves)

        await self._in_thread(compile_all)

    async def connect(self, groups: Sequence[Group]) -> None:
        """Opens the communicators of these groups."""
        for exchange in dict.fromkeys(map(self._exchange, groups)):
            await self._in_thread(exchange.connect)

    async def read(self, group: Group) -> list[DeviceBlocks]:
        """Reads and returns this process's contribution to an exchange, for each bundle of the group."""
        carriers = self._carriers(group)
        items = [item for carrier in carriers for item in carrier.reads()]
        arrays = await reading.read(self._reader, items)

        def contributions() -> list[DeviceBlocks]:
            read = reading.as_blocks(arrays, items)
            return [carrier.contribution(read) for carrier in carriers]

        return await self._in_thread(contributions)

    async def read_whole(self, group: Group) -> dict[int, jax.Array]:
        """Reads a group as plain Orbax does, without an exchange; returns the leaves that are complete with it."""
        leaves = [index for index in group.leaves if self._leaves.leaves[index].slice is None]
        sliced = [index for index in group.leaves if self._leaves.leaves[index].slice is not None]
        items = [self._whole_item(index) for index in sliced]
        whole, arrays = await asyncio.gather(self._read_arrays(self._reader, leaves), reading.read(self._reader, items))

        def complete() -> dict[int, jax.Array]:
            arrived: dict[int, DeviceBlocks] = {
                index: {shard.device: shard.data for shard in array.addressable_shards}
                for index, array in zip(sliced, arrays, strict=True)
            }
            return self._completed_by(arrived)

        return whole | (await self._in_thread(complete) if sliced else {})

    async def read_direct(self, leaves: Collection[int]) -> dict[int, jax.Array]:
        """Reads leaves as plain Orbax does."""
        return await self._read_arrays(self._handler, leaves)

    async def _read_arrays(self, handler: type_handlers.ArrayHandler, leaves: Collection[int]) -> dict[int, jax.Array]:
        if not leaves:
            return {}
        requests = [self._request.leaf_requests[leaf] for leaf in leaves]
        infos, args = [request.info for request in requests], [request.arg for request in requests]
        arrays = await type_handlers.ArrayHandler.deserialize(handler, infos, args)
        return dict(zip(leaves, arrays, strict=True))

    def _whole_item(self, index: int) -> reading.ReadItem:
        """Returns what this process reads of a slice if the slice does not travel: the rows of all its devices."""
        request = self._leaves.request(index)
        sharding = mesh_lib.replica_sharding(request.sharding, request.sharding.mesh)
        return reading.ReadItem(index, request, self._leaves.leaves[index], sharding, self._leaves.block(index))

    def start_exchange(self, group: Group, contributions: list[DeviceBlocks]) -> asyncio.Future[dict[int, jax.Array]]:
        """Starts an exchange; the future has the leaves that it completes. `contributions` is emptied."""
        carriers = self._carriers(group)

        def exchange() -> list[DeviceBlocks]:
            received = self._exchange(group).run(tuple(carrier.op for carrier in carriers), contributions)
            contributions.clear()
            jax.block_until_ready([list(blocks.values()) for blocks in received])
            return received

        async def finish() -> dict[int, jax.Array]:
            outputs = iter(await self._in_thread(exchange))

            def complete() -> dict[int, jax.Array]:
                received: dict[int, DeviceBlocks] = {}
                for carrier in carriers:
                    received.update(carrier.received(outputs))
                return self._completed_by(received)

            return await self._in_thread(complete)

        return asyncio.ensure_future(finish())

    def _completed_by(self, arrived: dict[int, DeviceBlocks]) -> dict[int, jax.Array]:
        """Returns the leaves that are complete with leaves and slices that have arrived."""
        requests, whole = self._request.leaf_requests, self._assembly.add(arrived)
        return {leaf: hand_over(requests[leaf], blocks) for leaf, blocks in whole.items()}

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await run_in_thread(function, self._limit)

    def _carriers(self, group: Group) -> list[Carrier]:
        replicas = self._replicas_of(group.mesh, group.axes)
        return [make_carrier(bundle, self._leaves, replicas) for bundle in group.bundles]

    def _exchange(self, group: Group) -> Exchange:
        key = (group.mesh, group.axes)
        if key not in self._exchanges:
            self._exchanges[key] = exchange_among(self._replicas_of(*key).table)
        return self._exchanges[key]


async def run_in_thread(function: Callable[[], T], limit: float) -> T:
    """Calls a function that runs programs in a thread, for at most `limit` seconds."""
    wide = jax.config.jax_enable_x64  # of the caller's thread, which `with jax.enable_x64(True)` may have set

    @functools.wraps(function)
    def call() -> T:
        with jax.enable_x64(wide):
            return function()

    return await in_thread(call, limit=limit)


def hand_over(request: LeafRequest, blocks: DeviceBlocks) -> jax.Array:
    """Returns the array with exactly the sharding and memory kind asked for, around the buffers that arrived."""
    kind = request.sharding.memory_kind
    buffers = [
        data
        if kind is None or kind == device.default_memory().kind
        else jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind))
        for device, data in blocks.items()
    ]
    return jax.make_array_from_single_device_arrays(request.leaf.shape, request.sharding, buffers)


class _Assembly:
    """Leaves of which not all slices have arrived."""

    def __init__(self, leaves: PlannedLeaves) -> None:
        self._leaves = leaves
        self._lock = threading.Lock()  # slices arrive from exchanges and from direct reads, in different threads
        self._begun: dict[int, Words] = {}
        self._missing = Counter(leaf.slice.leaf for leaf in leaves.leaves if leaf.slice is not None)

    def compile(self, arriving: Sequence[int]) -> None:
        for index in arriving:
            if self._leaves.leaves[index].slice is not None:
                self._assembler(index)

    def add(self, arrived: dict[int, DeviceBlocks]) -> dict[int, DeviceBlocks]:
        """Takes leaves and slices that have arrived; returns the leaves that are complete with them."""
        with self._lock:
            return self._add(arrived)

    def _add(self, arrived: dict[int, DeviceBlocks]) -> dict[int, DeviceBlocks]:
        complete: dict[int, DeviceBlocks] = {}
        for index, blocks in arrived.items():
            rows = self._leaves.leaves[index].slice
            if rows is None:
                complete[index] = blocks
                continue
            assembler = self._assembler(index)
            whole = self._begun.pop(rows.leaf, None)
            whole = assembler.place(assembler.begin() if whole is None else whole, rows, blocks)
            self._missing[rows.leaf] -= 1
            if self._missing[rows.leaf]:
                self._begun[rows.leaf] = whole
            else:
                complete[rows.leaf] = assembler.finish(whole)
        return complete

    def _assembler(self, index: int) -> Assembler:
        rows = self._leaves.leaves[index].slice
        assert rows is not None
        mesh = self._leaves.request(index).sharding.mesh
        here = tuple(device for device in mesh.devices.flat if is_local(device))
        return make_assembler(self._leaves.block(rows.leaf), self._leaves.block(index), rows.dim, here)
