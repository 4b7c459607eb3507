"""The blocks of a local checkpoint: which of them this process has, and how they get onto its devices."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext import text
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan.holders import ABSENT, Columns
from orbax_ext.redact import redact
from orbax_ext.request import LeafRequest, Request
from orbax_ext.storage.checkpoint import digest_files
from orbax_ext.storage.checkpoint.arrays import stored_chunks
from orbax_ext.transfer import reading
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.upstream.array_handler import read_view, without_array_metadata

_AT_A_TIME = 64  # leaves; more gain nothing, and each has a few buffers
_LONGEST = 300  # characters of an error in a log line


class LocalBlocks:
    """What this process has loaded from its local checkpoint: for each leaf, a block on some of its devices."""

    def __init__(self, handler: type_handlers.ArrayHandler, request: Request, tables: Mapping[int, Columns]) -> None:
        self._reader = without_array_metadata(handler)
        self._requests = request.leaf_requests
        self._tables = tables
        nothing = {index: [ABSENT] * len(table.of_process(jax.process_index())) for index, table in tables.items()}
        self.loaded: dict[int, Sequence[int]] = dict(nothing)  # for each device in the table: a column, or ABSENT
        self.blocks: dict[int, DeviceBlocks] = {}
        self.damaged: list[str] = []  # one line for each leaf that can't be read

    async def read(self, directory: epath.Path | None, infos: Sequence[Any]) -> None:
        """Loads what is there and can be read. Damage is logged, and counts as absence: others may have the leaf."""
        if directory is None:
            return
        try:
            to_load = await in_thread(self._to_load, directory)
        except Exception as error:  # whatever a damaged file makes TensorStore raise
            self._note(f"the local step {directory} can't be read", error)
            to_load = {}
        records = await in_thread(_digests, directory) if to_load else {}
        await _in_batches([self._try(index, columns, infos[index], records) for index, columns in to_load.items()])
        if self.damaged:
            logging.warning(
                "orbax_ext: %s of the local step %s can't be read; other hosts or storage have to provide them: %s",
                text.count(len(self.damaged), "leaf"),
                directory,
                text.listing(self.damaged),
            )

    async def read_gaps(self, gaps: Mapping[int, Mapping[int, int]], infos: Sequence[Any]) -> None:
        """Reads from storage the blocks that fall to this process, of leaves that the hosts have only in part."""
        here = jax.process_index()
        mine = {
            index: {at: readers[at] for at in self._tables[index].of_process(here) if at in readers}
            for index, readers in gaps.items()
        }
        await _in_batches([self._read_gap(index, readers, infos[index]) for index, readers in mine.items() if readers])

    async def _read_gap(self, index: int, readers: Mapping[int, int], info: Any) -> None:
        request = dataclasses.replace(self._requests[index], info=info)
        places, devices = self._tables[index].table.ravel(), request.sharding.mesh.devices.ravel()
        chosen = [(devices[places[at]], column) for at, column in readers.items()]
        self.blocks[index] = {**self.blocks.get(index, {}), **await self._load_blocks(index, request, chosen)}

    def _to_load(self, directory: epath.Path) -> dict[int, tuple[int, ...]]:
        """Returns for each leaf the columns of the blocks to load, one for each of this process's devices."""
        stored = stored_chunks(directory)
        here = jax.process_index()
        columns = {
            index: table.loads(here, self._requests[index].leaf, stored[self._requests[index].leaf.name])
            for index, table in self._tables.items()
            if self._requests[index].leaf.name in stored
        }
        return {index: chosen for index, chosen in columns.items() if set(chosen) != {ABSENT}}

    async def _try(self, index: int, columns: Sequence[int], info: Any, records: Mapping[str, Any]) -> None:
        request = dataclasses.replace(self._requests[index], info=info)
        try:
            if request.leaf.name in records:
                await in_thread(_check_digest, info, records[request.leaf.name])
            blocks = await self._load(index, columns, request)
        except Exception as error:
            self._note(request.leaf.name, error)
            return
        self.blocks[index], self.loaded[index] = blocks, columns

    async def _load(self, index: int, columns: Sequence[int], request: LeafRequest) -> DeviceBlocks:
        table, leaf = self._tables[index], request.leaf
        positions = table.of_process(jax.process_index())
        if all(column == position % table.count for column, position in zip(columns, positions, strict=True)):
            # In the devices' own memory, from which blocks travel.
            sharding = mesh_lib.replica_sharding(request.sharding, request.sharding.mesh)
            items = [reading.ReadItem(index, request, leaf, sharding, Block(leaf.block, jnp.dtype(leaf.dtype)))]
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

    def _note(self, what: str, error: BaseException) -> None:
        self.damaged.append(f"{what} ({redact(str(error))[:_LONGEST]})")


async def _in_batches(work: Sequence[Awaitable[None]]) -> None:
    for start in range(0, len(work), _AT_A_TIME):
        await asyncio.gather(*work[start : start + _AT_A_TIME])


def _digests(directory: epath.Path) -> Mapping[str, Any]:
    """Returns the digests stored beside a local checkpoint, by leaf name; none where they can't be read."""
    try:
        return digest_files.load(directory) or {}
    except (OSError, ValueError, KeyError):
        return {}


def _check_digest(info: Any, record: Mapping[str, Any]) -> None:
    found = digest_files.digest_of(info.parent_dir, info.name)
    if isinstance(found, str):
        raise ValueError(found)
    if found["digest"] != record["digest"]:
        raise ValueError(f"its digest is {found['digest']}, not {record['digest']} as stored beside the checkpoint")
