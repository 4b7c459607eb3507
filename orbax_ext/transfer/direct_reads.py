"""Leaves and slices that do not travel: this process reads all that its devices hold of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext.transfer import boxes, reading
from orbax_ext.transfer.assembly import Assembly
from orbax_ext.transfer.boxes import HostBlocks, ReadItem
from orbax_ext.transfer.carriers import PlannedLeaves
from orbax_ext.transfer.donation import donatable
from orbax_ext.transfer.programs import run_in_thread
from orbax_ext.transfer.reading import Blocks
from orbax_ext.transfer.release import is_releasing, release
from orbax_ext.transfer.room import Room
from orbax_ext.upstream.array_handler import Format, without_array_metadata
from orbax_ext.upstream.stored_arrays import deserialize

_BATCH = 16 << 20  # bytes per device that are read directly before they are handed over in one go
_BATCHES = 4  # read at a time

# What the reading of some leaves waits for before it begins, and what is done when they are read.
Turn = Callable[[Sequence[int]], contextlib.AbstractAsyncContextManager[Any]]


def at_once(leaves: Sequence[int]) -> contextlib.AbstractAsyncContextManager[Any]:
    """Waits for nothing."""
    return contextlib.nullcontext()


class NoteThroughOrbax:
    """Adds the names of leaves that Orbax has to read to a set."""

    def __init__(self, leaves: PlannedLeaves, names: set[str]) -> None:
        self._leaves = leaves
        self._names = names

    def __call__(self, indices: Iterable[int]) -> None:
        self._names.update(self._leaves.request(index).leaf.name for index in indices)


class DirectReads:
    """Reads what does not travel with TensorStore alone where that is possible, and hands it over in batches."""

    def __init__(
        self,
        handler: type_handlers.ArrayHandler,
        leaves: PlannedLeaves,
        assembly: Assembly,
        limit: float,
        note_through_orbax: NoteThroughOrbax,
        memory_limit: int | None,
    ) -> None:
        """`limit`: seconds that handing over may take. `memory_limit`: bytes per device that may be under way."""
        self._handler = handler
        self._reader = without_array_metadata(handler)
        self._leaves = leaves
        self._assembly = assembly
        self._limit = limit
        self._note_through_orbax = note_through_orbax
        # Half of the limit is left for shares of groups, which are read before and after these leaves.
        self._batch = _BATCH if memory_limit is None else max(1, min(_BATCH, memory_limit // (2 * _BATCHES)))
        self._memory = boxes.UsedMemory()
        # Thousands of leaves share a sharding.
        self._own_sharding = functools.cache(lambda sharding: mesh_lib.replica_sharding(sharding, sharding.mesh))

    async def read(
        self, leaves: Collection[int], held: Mapping[int, HostBlocks], turn: Turn = at_once
    ) -> dict[int, jax.Array]:
        """Reads all that this process holds of some leaves, except those whose blocks are `held`."""
        others = [leaf for leaf in leaves if leaf not in held]
        simple = [leaf for leaf in others if not self._leaves.request(leaf).leaf.direct_because]
        # Who frees the old state for the new one has little memory.
        frugal = any(is_releasing(self._leaves.request(leaf).arg) for leaf in simple)
        size, at_a_time = (min(self._batch, _BATCH // 8), 1) if frugal else (self._batch, _BATCHES)
        sizes = {leaf: self._leaves.leaves[leaf].block_bytes for leaf in simple}
        batches, room = _batches(sizes, size), Room(at_a_time * size)

        async def read_batch(batch: Sequence[int]) -> dict[int, jax.Array]:
            async with room.taken(sum(sizes[leaf] for leaf in batch)), turn(batch):
                return await self.read_own(batch)

        async def read_special(special: Sequence[int]) -> dict[int, jax.Array]:
            async with turn(special):
                self._note_through_orbax(special)
                self._release(special)
                return await self._read_arrays(self._handler, special)

        async def hand_over_held() -> dict[int, jax.Array]:
            self._release(held)
            return await run_in_thread(lambda: self._assembly.completed_by({**held}), self._limit) if held else {}

        special = sorted({*others} - {*simple})
        results = await asyncio.gather(hand_over_held(), read_special(special), *map(read_batch, batches))
        return {leaf: array for arrays in results for leaf, array in arrays.items()}

    def items(self, leaves: Iterable[int]) -> list[ReadItem]:
        """Returns what this process reads of leaves and slices that do not travel: what all its devices hold."""
        return [self._whole_item(leaf) for leaf in leaves]

    async def read_own(
        self,
        leaves: Sequence[int],
        all_read: Callable[[], None] = lambda: None,
        held: Mapping[int, HostBlocks] | None = None,
    ) -> dict[int, jax.Array]:
        """Reads leaves or slices on all devices of this process; returns the leaves that are complete with them.

        `held` are blocks that were read before. `all_read` is called when all is read. From then on it can't be given
        up: a thread puts the leaves together.
        """
        items = self.items(leaf for leaf in leaves if not held or leaf not in held)
        fetched: dict[int, Blocks] = {**(held or {}), **(await boxes.fetch(self._reader, items) if items else {})}
        left = [item for item in items if item.index not in fetched]
        self._note_through_orbax(item.index for item in left)
        self._release([item.index for item in left])
        whole, slices = [item.index for item in left if not item.leaf.slice], [item for item in left if item.leaf.slice]
        through_orbax, arrays = await asyncio.gather(
            self._read_arrays(self._reader, whole), reading.read(self._reader, slices)
        )

        lasting = [block for item in items if item.memory for block in fetched.get(item.index, {}).values()]

        def complete() -> dict[int, jax.Array]:
            self._release(leaves)
            for item, array in zip(slices, arrays, strict=True):
                fetched[item.index] = {shard.device: shard.data for shard in array.addressable_shards}
            arrays_here = self._assembly.completed_by(fetched)
            jax.block_until_ready(arrays_here)
            if not _share_memory(arrays_here.values(), lasting):
                self._memory.give_back(lasting)
            return through_orbax | arrays_here

        all_read()
        return await run_in_thread(complete, self._limit) if fetched or slices else through_orbax

    def give_up(self) -> None:
        """Frees the memory that is kept to read into."""
        self._memory.keep_nothing()

    def _release(self, leaves: Collection[int]) -> None:
        """Frees what leaves and slices that are about to be placed replace."""
        release(self._leaves.request(index).arg for index in leaves)

    async def _read_arrays(self, handler: type_handlers.ArrayHandler, leaves: Collection[int]) -> dict[int, jax.Array]:
        if not leaves:
            return {}
        requests = [self._leaves.request(leaf) for leaf in leaves]
        infos, args = [request.info for request in requests], [request.arg for request in requests]
        arrays = await deserialize(handler, infos, args)

        def owned() -> dict[int, jax.Array]:
            pairs = zip(leaves, requests, arrays, strict=True)
            # A copy of an array with a memory layout of its own would not have it.
            return {leaf: array if isinstance(one.sharding, Format) else donatable(array) for leaf, one, array in pairs}

        return await run_in_thread(owned, self._limit)

    def _whole_item(self, index: int) -> ReadItem:
        request, leaf = self._leaves.request(index), self._leaves.leaves[index]
        sharding = self._own_sharding(request.sharding)
        memory = self._memory if leaf.slice is None else None
        return ReadItem(index, request, leaf, sharding, self._leaves.block(index), memory=memory)


def _share_memory(arrays: Iterable[jax.Array], blocks: Sequence[np.ndarray]) -> bool:
    """Returns whether JAX has not copied blocks, as it does from such addresses. One array shows it for all."""
    addresses = {block.ctypes.data for block in blocks}
    shards: Sequence[jax.Shard] = next((array.addressable_shards for array in arrays), [])
    return any(shard.data.unsafe_buffer_pointer() in addresses for shard in shards)


def _batches(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Returns the indices of leaves with these sizes in batches of about `most` bytes."""
    numbered = zip(sizes, (end // most for end in itertools.accumulate(sizes.values())), strict=True)
    return [[index for index, _ in batch] for _, batch in itertools.groupby(numbered, key=lambda pair: pair[1])]
