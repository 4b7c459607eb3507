"""The blocks of a local checkpoint: which of them this process has, and how they get onto its devices."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext import text
from orbax_ext.meeting import holdings
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan.holders import ABSENT, Columns, Loaded
from orbax_ext.redact import redact
from orbax_ext.request import LeafRequest, Request
from orbax_ext.storage.checkpoint import digest_files
from orbax_ext.storage.checkpoint.arrays import stored_chunks
from orbax_ext.storage.s3.errors import reads_explained
from orbax_ext.transfer import boxes, reading
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.boxes import Box, HostBlocks, ReadItem
from orbax_ext.transfer.programs import run_in_thread
from orbax_ext.upstream.array_handler import without_array_metadata
from orbax_ext.upstream.stored_arrays import read_view

T = TypeVar("T")

_BATCH = 32  # leaves that are read and placed together, or more if they take less than `_BATCH_BYTES` on a device
_BATCH_BYTES = 32 << 20
_BATCHES = 2  # at a time: one is read while another one is placed
_DIGESTS_AT_A_TIME = 4  # leaves; each is read once more, up to 64 MiB at a time
_LONGEST = 300  # characters of an error in a log line


@dataclasses.dataclass(frozen=True)
class _Load:
    """Blocks of a leaf that are loaded together."""

    item: ReadItem
    columns: tuple[int, ...]  # for each of this process's devices in the leaf's table: the block, or ABSENT
    chosen: Mapping[jax.Device, int]  # the same without ABSENT, by device

    @property
    def index(self) -> int:
        return self.item.index

    @property
    def name(self) -> str:
        return self.item.leaf.name


class LocalBlocks:
    """The blocks that this process has in its local checkpoint, and those that it has loaded onto its devices.

    `stored` are descriptions of the leaves in persistent storage, from which gaps are read; `with_limits` returns them
    with the limits that reads from there have. `limit` is in seconds, for putting leaves onto the devices.
    """

    def __init__(
        self,
        handler: type_handlers.ArrayHandler,
        request: Request,
        tables: Mapping[int, Columns],
        stored: Sequence[Any],
        limit: float,
        with_limits: Callable[[Sequence[Any]], Sequence[Any]] = list,
    ) -> None:
        self._limit = limit
        self._with_limits = with_limits
        self._reader = without_array_metadata(handler)
        self._requests = request.leaf_requests
        self._tables = tables
        self._stored = stored
        self._local: Sequence[Any] = ()
        self._digests: digest_files.StoredDigests | None = None
        self._digesting = asyncio.Semaphore(_DIGESTS_AT_A_TIME)
        self._damaged: dict[int, str] = {}  # a text for each leaf that can't be read
        self._untold: set[int] = set()  # leaves that can't be read, which the other processes do not know yet
        # For each leaf and each of this process's devices in its table, a column or ABSENT: the block of its own that
        # the device can load from the local checkpoint, and the block that it has loaded. In `present`, they are
        # followed by the columns of other blocks that are there, see `Columns.offers`.
        self.present: dict[int, tuple[int, ...]] = {index: (ABSENT,) * len(self._mine(index)) for index in tables}
        self.loaded = dict(self.present)
        self.blocks: dict[int, DeviceBlocks] = {}

    async def look(self, directory: epath.Path | None, local: Sequence[Any]) -> None:
        """Finds out what is there, without reading it. `local` are descriptions of the leaves in that directory."""
        if directory is None:
            return
        self._local = local
        try:
            self.present |= await in_thread(self._offers, directory)
        except Exception as error:  # whatever a damaged file makes TensorStore raise
            logging.warning(
                "orbax_ext: the local step %s can't be read; other hosts or storage have to provide it: %s",
                directory,
                _short(error),
            )
            return
        self._digests = await in_thread(_stored_digests, directory)

    async def load(
        self, leaves: Iterable[int], gaps: Mapping[int, Mapping[int, int]], loaded: Loaded | None = None
    ) -> None:
        """Loads this process's blocks of some leaves: from storage those gaps that fall to it, all others from here.

        `loaded` is what all devices have loaded then; None: each the block that it needs. A leaf that is damaged here
        is noted; others may have it.
        """
        local: list[_Load] = []
        from_storage: dict[int, dict[int, int]] = {}
        for index in leaves:
            pattern = self._tables[index].complete if loaded is None else loaded
            wanted = {at: pattern[at] for at in self._mine(index)}
            gap = {at: column for at, column in wanted.items() if at in gaps.get(index, {})}
            have = zip(wanted.items(), self.loaded[index], strict=True)
            here = {at: column for (at, column), old in have if at not in gap and column not in (ABSENT, old)}
            if here and index in self._damaged:  # no plan asks for it again
                raise RuntimeError(f"a leaf that can't be read was to be read again: {self._damaged[index]}")
            if here:
                local.append(self._load_of(index, here, self._local[index]))
            if gap:
                from_storage[index] = gap
        infos = self._with_limits([self._stored[index] for index in from_storage]) if from_storage else []
        stored = [self._load_of(*gap, info) for gap, info in zip(from_storage.items(), infos, strict=True)]
        await _all_of([_in_batches(self._load_gaps, stored), _in_batches(self._load_here, local)])

    def tell_damaged(self) -> dict[str, Any]:
        """Returns the message that names the leaves that turned out to be damaged since the last one."""
        told, self._untold = self._untold, set()
        return {"damaged": holdings.pack(dict.fromkeys(sorted(told), ()))} if told else {}

    def log_damaged(self, directory: epath.Path | None) -> None:
        """Logs one line if leaves turned out to be damaged."""
        if self._damaged:
            logging.warning(
                "orbax_ext: %s of the local step %s can't be read; other hosts or storage have to provide them: %s",
                text.count(len(self._damaged), "leaf"),
                directory,
                text.listing([*self._damaged.values()]),
            )

    def _mine(self, index: int) -> Sequence[int]:
        return self._tables[index].of_process(jax.process_index())

    def _offers(self, directory: epath.Path) -> dict[int, tuple[int, ...]]:
        """Returns for each leaf what this process can load."""
        stored = stored_chunks(directory)
        here = jax.process_index()
        return {
            index: table.offers(here, self._requests[index].leaf, stored[self._requests[index].leaf.name])
            for index, table in self._tables.items()
            if self._requests[index].leaf.name in stored
        }

    def _load_of(self, index: int, columns: Mapping[int, int], info: Any) -> _Load:
        """Returns the load of these blocks, by position in the leaf's table. `info` says where they are stored."""
        request, table = dataclasses.replace(self._requests[index], info=info), self._tables[index]
        devices, places = request.sharding.mesh.devices.ravel(), table.table.ravel()
        chosen = {devices[places[at]]: column for at, column in columns.items()}
        own = len(columns) == len(self._mine(index)) and all(c == at % table.count for at, c in columns.items())
        leaf = request.leaf
        # In the devices' own memory, from which blocks travel.
        sharding = mesh_lib.replica_sharding(request.sharding, request.sharding.mesh)
        boxes_to_read = None
        if not own:
            by_column: dict[int, tuple[jax.Device, ...]] = {}
            for device, column in chosen.items():
                by_column[column] = (*by_column.get(column, ()), device)
            boxes_to_read = tuple((_box(table.blocks[c], leaf.block), among) for c, among in by_column.items())
        block = Block(leaf.block, jnp.dtype(leaf.dtype))
        return _Load(
            ReadItem(index, request, leaf, sharding, block, boxes=boxes_to_read),
            tuple(columns.get(at, ABSENT) for at in self._mine(index)),
            chosen,
        )

    async def _load_here(self, loads: Sequence[_Load]) -> None:
        """Loads blocks from the local checkpoint; those of leaves that can't be read are noted."""
        unharmed = await _all_of(map(self._matches_digest, loads))
        readable = [load for load, matches in zip(loads, unharmed, strict=True) if matches]
        try:
            fetched = await boxes.fetch(self._reader, [load.item for load in readable]) if readable else {}
        except Exception:  # they are tried one by one
            fetched = {}
        await self._place(fetched, readable)
        await _all_of(self._try(load) for load in readable if load.index not in fetched)

    async def _load_gaps(self, loads: Sequence[_Load]) -> None:
        """Loads blocks from storage."""
        with reads_explained(loads[0].item.request.info.parent_dir):
            fetched = await boxes.fetch(self._reader, [load.item for load in loads])
            await self._place(fetched, loads)
            await _all_of(self._add_read(load) for load in loads if load.index not in fetched)

    async def _place(self, fetched: Mapping[int, HostBlocks], loads: Sequence[_Load]) -> None:
        """Puts blocks that were fetched onto their devices, all in one call."""
        placing = [load for load in loads if load.index in fetched]
        blocks = [
            {device: block.reshape(load.item.block.shape) for device, block in fetched[load.index].items()}
            for load in placing
        ]
        if placing:
            placed = await run_in_thread(lambda: reading.placed(blocks), self._limit)
            for load, on_devices in zip(placing, placed, strict=True):
                self._add(load, on_devices)

    async def _matches_digest(self, load: _Load) -> bool:
        """Returns whether a leaf has its digest, if one is stored; notes it if it has not."""
        if self._digests is not None and load.name in self._digests.leaves:
            async with self._digesting:
                try:
                    await in_thread(_check_digest, load.item.request.info, self._digests)
                except Exception as error:
                    self._note_damaged(load, error)
                    return False
        return True

    async def _try(self, load: _Load) -> None:
        try:
            await self._add_read(load)
        except (MemoryError, jax.errors.JaxRuntimeError):  # it may be readable, but there is no room for it
            raise
        except Exception as error:  # whatever a damaged file makes TensorStore raise
            self._note_damaged(load, error)

    def _note_damaged(self, load: _Load, error: Exception) -> None:
        self._damaged[load.index] = f"{load.name} ({_short(error)})"
        self._untold.add(load.index)

    async def _add_read(self, load: _Load) -> None:
        """Reads what is not fetched, through Orbax."""
        if load.item.boxes is None:
            (array,) = await reading.read(self._reader, [load.item])
            self._add(load, {shard.device: shard.data for shard in array.addressable_shards})
        else:
            self._add(load, await self._load_blocks(load.index, load.item.request, list(load.chosen.items())))

    def _add(self, load: _Load, blocks: DeviceBlocks) -> None:
        both = zip(load.columns, self.loaded[load.index], strict=True)
        self.loaded[load.index] = tuple(old if new == ABSENT else new for new, old in both)
        self.blocks[load.index] = {**self.blocks.get(load.index, {}), **blocks}

    async def _load_blocks(
        self, index: int, request: LeafRequest, chosen: Sequence[tuple[jax.Device, int]]
    ) -> DeviceBlocks:
        places = self._tables[index].blocks
        blocks = await _all_of(self._load_block(request, places[column], device) for device, column in chosen)
        return dict(zip((device for device, _ in chosen), blocks, strict=True))

    async def _load_block(self, request: LeafRequest, place: Sequence[int], device: jax.Device) -> jax.Array:
        leaf = request.leaf
        origin = [at * size for at, size in zip(place, leaf.block, strict=True)]
        return await read_view(
            self._reader,
            request.info,
            request.arg,
            SingleDeviceSharding(device),
            stored_shape=leaf.shape,
            transform={
                "input_inclusive_min": [0] * len(origin),
                "input_exclusive_max": list(leaf.block),
                "output": [{"input_dimension": dim, "offset": start} for dim, start in enumerate(origin)],
            },
            shape=leaf.block,
        )


def _short(error: BaseException) -> str:
    return redact(str(error))[:_LONGEST]


def _box(place: Sequence[int], block: Sequence[int]) -> Box:
    """Returns the box of a block at its place in the grid of blocks."""
    return tuple((at * size, (at + 1) * size) for at, size in zip(place, block, strict=True))


async def _in_batches(load: Callable[[list[_Load]], Coroutine[Any, Any, None]], loads: Sequence[_Load]) -> None:
    batches = [*_batches(loads)]

    async def every_so_many(first: int) -> None:
        for batch in batches[first::_BATCHES]:
            await load(batch)

    await _all_of(map(every_so_many, range(_BATCHES)))


def _batches(loads: Sequence[_Load]) -> Iterator[list[_Load]]:
    batch: list[_Load] = []
    size = 0
    for load in loads:
        if len(batch) >= _BATCH and size + load.item.device_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(load)
        size += load.item.device_bytes
    if batch:
        yield batch


async def _all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all; if one fails, the others are cancelled, and its error is raised."""
    failure = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback refers to this frame, and the frame to what was loaded
    return [task.result() for task in tasks]


def _stored_digests(directory: epath.Path) -> digest_files.StoredDigests | None:
    """Returns the digests stored beside a local checkpoint; None where they can't be read."""
    try:
        stored = digest_files.load(directory)
        for record in stored.leaves.values() if stored else ():
            if not isinstance(record["digest"], str):
                raise TypeError(f"expected a digest as text, found {record['digest']!r}")
    except Exception as error:  # whatever other content than expected makes Python raise
        logging.warning(
            "orbax_ext: the digests beside the local step %s can't be read; its leaves are not compared with them: %s",
            directory,
            _short(error),
        )
        return None
    return stored


def _check_digest(info: Any, stored: digest_files.StoredDigests) -> None:
    found, digest = (
        digest_files.digest_of(info.parent_dir, info.name, stored.version),
        stored.leaves[info.name]["digest"],
    )
    if isinstance(found, str):
        raise ValueError(found)
    if found["digest"] != digest:
        raise ValueError(f"its digest is {found['digest']}, not {digest} as stored beside the checkpoint")
