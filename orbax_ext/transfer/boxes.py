"""Reads boxes of stored arrays with TensorStore alone, straight into buffers that travel.

`ArrayHandler.deserialize` makes tasks, a zero-filled array and a `device_put` for each shard, which costs a small leaf
several times what TensorStore takes to read it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest
from orbax_ext.transfer import again
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.requests import REQUESTS
from orbax_ext.upstream import runtime
from orbax_ext.upstream.stored_arrays import (
    begin_opening,
    bytes_under_way,
    fits_under_way,
    read_footprint,
    reopening,
    store_of,
)

HostBlocks = Mapping[jax.Device, np.ndarray]
Box = tuple[tuple[int, int], ...]  # first row and end in each dimension

_ALIGNMENT = 64  # bytes; JAX's CPU backend takes such a buffer as it is, and copies any other
_OFF = 8  # bytes from there; every dtype can be viewed at such an address
_SMALL = 256 << 10  # bytes of an array of which no box is read by itself if all are needed
_AT_ONCE = 100  # reads that begin before other tasks of the event loop have a turn


@dataclasses.dataclass(frozen=True)
class ReadItem:
    """One leaf, or a slice of one, that this process reads."""

    index: int  # of the leaf or slice in the plan
    request: LeafRequest  # of the whole leaf
    leaf: Leaf  # the request's leaf, or a slice of it
    sharding: NamedSharding  # to read it with
    block: Block  # that it makes on each device
    buffers: HostBlocks | None = None  # to read into, where they exist already
    memory: UsedMemory | None = None  # to read into if the blocks become the restored array; others only travel
    boxes: tuple[tuple[Box, tuple[jax.Device, ...]], ...] | None = None  # to read, if not those of the sharding

    @property
    def device_bytes(self) -> int:
        """The bytes that the item takes on each device."""
        return math.prod(self.block.shape) * self.leaf.itemsize


async def fetch(handler: type_handlers.ArrayHandler, items: Sequence[ReadItem]) -> dict[int, HostBlocks]:
    """Reads those items that are wanted just as they are stored; returns their blocks by index.

    All others are left to Orbax: casts, padding, types of less than a byte. So is what can't be read, because the
    caller expects Orbax's own error.
    """
    candidates = [item for item in items if _can_be_simple(item)]
    sizes = [item.device_bytes for item in candidates]
    infos, numbers = [item.request.info for item in candidates], [item.index for item in candidates]
    stores = await _results(await begin_opening(handler, infos, sizes, numbers, REQUESTS.limit))
    reopened = reopening()
    reads = [
        read
        for item, store in zip(candidates, stores, strict=True)
        if store is not None and _as_stored(item, store)
        for read in _reads(item, store, reopened)
    ]
    limiter = items[0].request.info.byte_limiter
    footprint = sum(read.footprint for read in reads)
    if not reads or not fits_under_way(limiter, footprint):
        return {}
    async with bytes_under_way(limiter, footprint), REQUESTS.reading():
        futures = []
        for number, read in enumerate(reads, 1):
            futures.append(read.begin())
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        futures = await again.answers(reads, futures, _ended, store_of(items[0].request.info))
    failed = {read.item.index for read, future in zip(reads, futures, strict=True) if future.exception() is not None}
    blocks: dict[int, dict[jax.Device, np.ndarray]] = {}
    for read in reads:
        if read.item.index not in failed:
            blocks.setdefault(read.item.index, {}).update(read.blocks())
    return dict(blocks)


def _reads(item: ReadItem, store: Any, reopened: Callable[[Any], Any]) -> list[_BoxRead] | list[_ArrayRead]:
    """Returns the reads of an item: one for each box, or one for all of them where that costs less."""
    parts = _boxes(item)
    if len(parts) > 1 and item.leaf.slice is None:
        whole = math.prod(store.shape)
        covered = sum(math.prod(end - first for first, end in box) for _, box, _ in parts)
        if covered == whole and whole * item.block.dtype.itemsize <= _SMALL:
            return [_ArrayRead(item, store, {box: devices for _, box, devices in parts}, reopened)]
    return [_BoxRead(item, store, stored, box, devices, reopened) for stored, box, devices in parts]


class _ArrayRead:
    """A small array all boxes of which are on this process: a copy of each costs less than a read of each."""

    def __init__(
        self,
        item: ReadItem,
        store: Any,
        devices: Mapping[Box, Sequence[jax.Device]],
        reopened: Callable[[Any], Any],
    ) -> None:
        self.item = item
        self._store = store
        self._devices = devices
        self._reopened = reopened
        self._array = self._second = np.empty(store.shape, item.block.dtype)
        self.footprint = self._array.nbytes

    def begin(self) -> Any:
        return ts.array(self._array).write(self._store)

    def begin_again(self) -> Any:
        self._second = np.empty_like(self._array)
        return ts.array(self._second).write(self._reopened(self._store))

    def take_second(self) -> None:
        """Leaves the first array, into which the first read may still write."""
        self._array = self._second

    def blocks(self) -> HostBlocks:
        """Returns what was read, for each device."""
        item, blocks = self.item, {}
        make = item.memory.empty if item.memory else aligned_empty
        for box, devices in self._devices.items():
            part = self._array[tuple(slice(*rows) for rows in box)]
            if item.buffers is None:
                block = make(part.shape, part.dtype)
                block[...] = part
                blocks.update(dict.fromkeys(devices, block.reshape(item.block.carried_shape)))
            else:
                for device in devices:
                    item.buffers[device][...] = part
                    blocks[device] = item.buffers[device]
        return blocks


class _BoxRead:
    """One box of an item, that one or several devices hold."""

    def __init__(
        self,
        item: ReadItem,
        store: Any,
        stored: Box,
        box: Box,
        devices: Sequence[jax.Device],
        reopened: Callable[[Any], Any],
    ) -> None:
        self.item = item
        whole = all(size == end - first for (first, end), size in zip(stored, store.shape, strict=True))
        self._source = store if whole else store[tuple(slice(*rows) for rows in stored)]
        self.footprint = math.prod(store.shape) * item.request.leaf.itemsize
        if not whole:
            self.footprint = read_footprint(store, self._source.domain)
        self._devices = devices
        self._reopened = reopened
        shape = tuple(end - first for first, end in box)
        given = item.buffers
        self._given = given
        self._make = item.memory.empty if item.memory else aligned_empty
        self._buffer = self._make(shape, item.block.dtype) if given is None else given[devices[0]]
        self._second = self._buffer

    def begin(self) -> Any:
        return ts.array(self._buffer).write(self._source)

    def begin_again(self) -> Any:
        self._second = self._make(self._buffer.shape, self._buffer.dtype)
        return ts.array(self._second).write(self._reopened(self._source))

    def take_second(self) -> None:
        """Leaves the first buffer, into which the first read may still write."""
        self._buffer, self._given = self._second, None

    def blocks(self) -> HostBlocks:
        """Returns what was read, for each device."""
        given = self._given
        if given is None:
            return dict.fromkeys(self._devices, self._buffer.reshape(self.item.block.carried_shape))
        for device in self._devices[1:]:
            given[device][...] = self._buffer
        return {device: given[device] for device in self._devices}


def fetched_bytes(item: ReadItem) -> int:
    """Returns the bytes that `fetch` reads for an item; 0 if it leaves the item to Orbax, as far as is known."""
    if not _can_be_simple(item):
        return 0
    rows = (math.prod(end - first for first, end in box) for _, box, _ in _boxes(item))
    return sum(rows) * int(item.block.dtype.itemsize)


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array that is not filled with anything, at an address that JAX can use without a copy."""
    return _empty(shape, dtype, 0)


def unaligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns an array that is not filled with anything, at an address that JAX copies from.

    An array around somebody else's memory can't be donated: a donating step would not reuse it (jax #18617).
    """
    return _empty(shape, dtype, _OFF)


def is_aligned(address: int) -> bool:
    """Returns whether JAX would use memory at this address without a copy."""
    return address % _ALIGNMENT == 0


class UsedMemory:
    """Memory to read into that is used again when it has been copied: new pages cost more than a copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[np.ndarray]] = {}  # by size
        self._kept = True

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Returns what `unaligned_empty` does."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else unaligned_empty((size,), np.uint8)
        return memory.view(dtype).reshape(shape)

    def give_back(self, blocks: Iterable[np.ndarray]) -> None:
        """Keeps this memory for `empty`, and only this: no more than was under way at once."""
        own = {block.ctypes.data: block for block in blocks}
        free: dict[int, list[np.ndarray]] = {}
        for block in own.values():
            free.setdefault(block.nbytes, []).append(block.reshape(-1).view(np.uint8))
        with self._lock:
            self._free = free if self._kept else {}

    def keep_nothing(self) -> None:
        """Frees this memory, and what is given back later."""
        with self._lock:
            self._kept, self._free = False, {}


def _empty(shape: Sequence[int], dtype: Any, offset: int) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT + offset, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT + offset
    return memory[start : start + size].view(dtype).reshape(shape)


def _box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box that JAX means by an index."""
    return tuple(rows.indices(size)[:2] for rows, size in zip(index, shape, strict=True))


def _can_be_simple(item: ReadItem) -> bool:
    """Returns whether an item's boxes are boxes of the stored array, by what is known before the array is opened."""
    if runtime.bits(item.block.dtype) < 8 or not math.prod(item.leaf.shape):
        return False
    return all(stored is not None for stored, _, _ in _boxes(item))


def _as_stored(item: ReadItem, store: Any) -> bool:
    wanted = item.request.leaf
    return tuple(store.shape) == wanted.shape and store.dtype.numpy_dtype == item.block.dtype


def _boxes(item: ReadItem) -> list[tuple[Any, Box, Sequence[jax.Device]]]:
    """Returns each box in the stored array (None if its rows are apart there), the same in the item, its devices."""
    if item.boxes is not None:
        return [(box, box, devices) for box, devices in item.boxes]
    return [(_in_storage(item, box), box, devices) for box, devices in _on_devices(item.sharding, item.leaf.shape)]


@functools.lru_cache(maxsize=256)
def _on_devices(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[tuple[Box, tuple[jax.Device, ...]], ...]:
    """Returns the boxes that this process's devices hold; a box that several hold is read once."""
    devices: dict[Box, tuple[jax.Device, ...]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = _box_of(index or (), shape)
        devices[box] = (*devices.get(box, ()), device)
    return tuple(devices.items())


def _in_storage(item: ReadItem, box: Box) -> Box | None:
    rows, whole = item.leaf.slice, item.request.leaf
    if rows is None:
        return box
    first, end = box[rows.dim]
    shard = first // rows.size
    if (end - 1) // rows.size != shard:
        return None
    offset = shard * (whole.block[rows.dim] - rows.size) + rows.start
    return (*box[: rows.dim], (first + offset, end + offset), *box[rows.dim + 1 :])


async def _results(futures: Sequence[Any]) -> list[Any]:
    """Returns the results of TensorStore's futures; None for those that failed."""
    await _ended(futures)
    return [None if future.exception() is not None else future.result() for future in futures]


async def _ended(futures: Sequence[Any]) -> None:
    """Waits for TensorStore's futures. The event loop wakes up once for all of them."""
    if not futures:
        return
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    left = itertools.count(len(futures) - 1, -1)

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    def count(_: Any) -> None:
        if next(left) == 0 and not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    for future in futures:
        future.add_done_callback(count)
    try:
        await ended
    except asyncio.CancelledError:
        for future in futures:
            future.cancel()
        raise
