"""The blocks of a local checkpoint: which of them this process has, and how they get onto its devices."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from orbax_ext.plan.holders import ABSENT, Columns
from orbax_ext.redact import redact
from orbax_ext.request import LeafRequest, Request
from orbax_ext.storage.checkpoint import digest_files
from orbax_ext.storage.checkpoint.arrays import stored_chunks
from orbax_ext.transfer import boxes, reading
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.boxes import ReadItem
from orbax_ext.transfer.programs import run_in_thread
from orbax_ext.upstream.array_handler import without_array_metadata
from orbax_ext.upstream.stored_arrays import read_view

_AT_A_TIME = 64  # leaves; more gain nothing, and each has a few buffers
_DIGESTS_AT_A_TIME = 4  # leaves; each is read once more, up to 64 MiB at a time
_LONGEST = 300  # characters of an error in a log line


class LocalBlocks:
    """The blocks that this process has in its local checkpoint, and those that it has loaded onto its devices.

    `stored` are descriptions of the leaves in persistent storage, from which gaps are read. `limit` is in seconds, for
    putting a leaf onto the devices.
    """

    def __init__(
        self,
        handler: type_handlers.ArrayHandler,
        request: Request,
        tables: Mapping[int, Columns],
        stored: Sequence[Any],
        limit: float,
    ) -> None:
        self._limit = limit
        self._reader = without_array_metadata(handler)
        self._requests = request.leaf_requests
        self._tables = tables
        self._stored = stored
        self._local: Sequence[Any] = ()
        self._digests: digest_files.StoredDigests | None = None
        self._digesting = asyncio.Semaphore(_DIGESTS_AT_A_TIME)
        self._damaged: list[str] = []  # one text for each leaf that can't be read
        self._untold: set[int] = set()  # leaves that can't be read, which the other processes do not know yet
        # For each leaf and each of this process's devices in its table, a column or ABSENT: the block that the device
        # can load from the local checkpoint, and the block that it has loaded.
        self.present: dict[int, tuple[int, ...]] = {index: (ABSENT,) * len(self._mine(index)) for index in tables}
        self.loaded = dict(self.present)
        self.blocks: dict[int, DeviceBlocks] = {}

    async def look(self, directory: epath.Path | None, local: Sequence[Any]) -> None:
        """Finds out what is there, without reading it. `local` are descriptions of the leaves in that directory."""
        if directory is None:
            return
        self._local = local
        try:
            self.present |= await in_thread(self._to_load, directory)
        except Exception as error:  # whatever a damaged file makes TensorStore raise
            logging.warning(
                "orbax_ext: the local step %s can't be read; other hosts or storage have to provide it: %s",
                directory,
                _short(error),
            )
            return
        self._digests = await in_thread(_stored_digests, directory)

    async def load(self, leaves: Iterable[int], gaps: Mapping[int, Mapping[int, int]]) -> None:
        """Loads what is there of some leaves, and from storage those of their gaps that fall to this process.

        A leaf that is damaged here is noted; others may have it.
        """
        work = []
        for index in leaves:
            if set(self.present[index]) != {ABSENT}:
                work.append(self._try(index, self.present[index]))
            mine = {at: gaps[index][at] for at in self._mine(index) if at in gaps[index]} if index in gaps else {}
            if mine:
                work.append(self._load_gap(index, mine))
        for start in range(0, len(work), _AT_A_TIME):
            await asyncio.gather(*work[start : start + _AT_A_TIME])

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
                text.listing(self._damaged),
            )

    def _mine(self, index: int) -> Sequence[int]:
        return self._tables[index].of_process(jax.process_index())

    def _to_load(self, directory: epath.Path) -> dict[int, tuple[int, ...]]:
        """Returns for each leaf the columns of the blocks to load, one for each of this process's devices."""
        stored = stored_chunks(directory)
        here = jax.process_index()
        return {
            index: table.loads(here, self._requests[index].leaf, stored[self._requests[index].leaf.name])
            for index, table in self._tables.items()
            if self._requests[index].leaf.name in stored
        }

    async def _try(self, index: int, columns: tuple[int, ...]) -> None:
        request = dataclasses.replace(self._requests[index], info=self._local[index])
        self.present[index] = (ABSENT,) * len(columns)  # it is loaded once, or found to be damaged
        try:
            if self._digests is not None and request.leaf.name in self._digests.leaves:
                async with self._digesting:
                    await in_thread(_check_digest, request.info, self._digests)
            blocks = await self._load(index, columns, request)
        except Exception as error:
            self._damaged.append(f"{request.leaf.name} ({_short(error)})")
            self._untold.add(index)
            return
        self._add(index, columns, blocks)

    async def _load_gap(self, index: int, readers: Mapping[int, int]) -> None:
        request = dataclasses.replace(self._requests[index], info=self._stored[index])
        places, devices = self._tables[index].table.ravel(), request.sharding.mesh.devices.ravel()
        chosen = [(devices[places[at]], column) for at, column in readers.items()]
        columns = tuple(readers.get(at, ABSENT) for at in self._mine(index))
        self._add(index, columns, await self._load_blocks(index, request, chosen))

    def _add(self, index: int, columns: Sequence[int], blocks: DeviceBlocks) -> None:
        both = zip(columns, self.loaded[index], strict=True)
        self.loaded[index] = tuple(old if new == ABSENT else new for new, old in both)
        self.blocks[index] = {**self.blocks.get(index, {}), **blocks}

    async def _load(self, index: int, columns: Sequence[int], request: LeafRequest) -> DeviceBlocks:
        table, leaf = self._tables[index], request.leaf
        positions = self._mine(index)
        if all(column == position % table.count for column, position in zip(columns, positions, strict=True)):
            # In the devices' own memory, from which blocks travel.
            sharding = mesh_lib.replica_sharding(request.sharding, request.sharding.mesh)
            items = [ReadItem(index, request, leaf, sharding, Block(leaf.block, jnp.dtype(leaf.dtype)))]
            if leaf.shape and (fetched := await boxes.fetch(self._reader, items)):
                return (await run_in_thread(lambda: reading.placed([fetched[index]]), self._limit))[0]
            (array,) = await reading.read(self._reader, items)
            return {shard.device: shard.data for shard in array.addressable_shards}
        devices = request.sharding.mesh.devices.ravel()[table.table.ravel()[positions]]
        chosen = [(device, column) for device, column in zip(devices, columns, strict=True) if column != ABSENT]
        return await self._load_blocks(index, request, chosen)

    async def _load_blocks(
        self, index: int, request: LeafRequest, chosen: Sequence[tuple[jax.Device, int]]
    ) -> DeviceBlocks:
        places = self._tables[index].blocks
        loading = [self._load_block(request, places[column], device) for device, column in chosen]
        return dict(zip((device for device, _ in chosen), await asyncio.gather(*loading), strict=True))

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


def _stored_digests(directory: epath.Path) -> digest_files.StoredDigests | None:
    """Returns the digests stored beside a local checkpoint; None where they can't be read."""
    try:
        return digest_files.load(directory)
    except (OSError, ValueError, KeyError):
        return None


def _check_digest(info: Any, stored: digest_files.StoredDigests) -> None:
    found, digest = (
        digest_files.digest_of(info.parent_dir, info.name, stored.version),
        stored.leaves[info.name]["digest"],
    )
    if isinstance(found, str):
        raise ValueError(found)
    if found["digest"] != digest:
        raise ValueError(f"its digest is {found['digest']}, not {digest} as stored beside the checkpoint")
