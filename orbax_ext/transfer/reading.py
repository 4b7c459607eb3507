"""Reads leaves, and slices of leaves: with TensorStore alone, or through Orbax's own `ArrayHandler.deserialize`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest
from orbax_ext.storage.s3.errors import reads_explained
from orbax_ext.transfer import boxes
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.boxes import HostBlocks, ReadItem
from orbax_ext.upstream import runtime
from orbax_ext.upstream.stored_arrays import deserialize, read_view

Blocks = DeviceBlocks | HostBlocks  # a block for each of this process's devices: there, or still on the host


async def read_blocks(
    handler: type_handlers.ArrayHandler, items: Sequence[ReadItem], held: Mapping[int, HostBlocks] | None = None
) -> dict[int, Blocks]:
    """Returns the block of every item for each of this process's devices, by the item's index.

    Those that are `held` need not be read.
    """
    held = held or {}
    wanted = [item for item in items if item.index not in held]
    if not wanted:
        return {**held}
    fetched = await boxes.fetch(handler, wanted)
    others = [item for item in wanted if item.index not in fetched]
    return {**held, **fetched, **as_blocks(await read(handler, others), others)}


def placed(contributions: Sequence[Blocks]) -> list[DeviceBlocks]:
    """Puts blocks that are on the host onto their devices, in one call: each costs more than a small block does."""
    places = [(at, device) for at, blocks in enumerate(contributions) for device in blocks if _on_host(blocks[device])]
    arrays = jax.device_put([contributions[at][device] for at, device in places], [device for _, device in places])
    results: list[dict[jax.Device, Any]] = [dict(blocks) for blocks in contributions]
    for (at, device), array in zip(places, arrays, strict=True):
        results[at][device] = array
    return [*results]


def hand_over(request: LeafRequest, blocks: Blocks) -> jax.Array:
    """Returns the array with exactly the sharding and memory kind asked for.

    Buffers that have arrived on devices are wrapped; blocks on the host, all of them, are copied to their devices.
    """
    shape, sharding = request.leaf.shape, request.sharding
    if on_host(blocks):
        return runtime.put_blocks(shape, sharding, blocks)
    kind = sharding.memory_kind
    buffers = [
        data
        if kind is None or kind == device.default_memory().kind
        else jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind))
        for device, data in blocks.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers)


def on_host(blocks: Blocks) -> bool:
    """Returns whether all blocks are still on the host."""
    return all(map(_on_host, blocks.values()))


def _on_host(block: Any) -> bool:
    return isinstance(block, np.ndarray)


async def read(handler: type_handlers.ArrayHandler, items: Sequence[ReadItem]) -> list[jax.Array]:
    """Reads this process's shards of every item through Orbax."""
    whole = [item for item in items if item.leaf.slice is None]
    sliced = [item for item in items if item.leaf.slice is not None]
    arrays, *views = await asyncio.gather(_read_whole(handler, whole), *(_read_slice(handler, item) for item in sliced))
    by_index = {item.index: array for item, array in zip([*whole, *sliced], [*arrays, *views], strict=True)}
    return [by_index[item.index] for item in items]


def as_blocks(arrays: Sequence[jax.Array], items: Sequence[ReadItem]) -> dict[int, DeviceBlocks]:
    """Returns arrays that were read as a block on each of this process's devices, by the item's index."""
    return {
        item.index: {
            shard.device: as_carried(shard.data, shard.device, item.block) for shard in array.addressable_shards
        }
        for array, item in zip(arrays, items, strict=True)
    }


async def _read_whole(handler: type_handlers.ArrayHandler, items: Sequence[ReadItem]) -> Sequence[jax.Array]:
    if not items:
        return []
    args = [_with_sharding(item.request.arg, item.sharding) for item in items]
    return await deserialize(handler, [item.request.info for item in items], args)


async def _read_slice(handler: type_handlers.ArrayHandler, item: ReadItem) -> jax.Array:
    with reads_explained(item.request.info.parent_dir):
        return await read_view(
            handler,
            item.request.info,
            item.request.arg,
            item.sharding,
            stored_shape=item.request.leaf.shape,
            transform=_index_transform(item.request.leaf, item.leaf),
            shape=item.leaf.shape,
        )


def _index_transform(whole: Leaf, leaf: Leaf) -> dict[str, Any]:
    """Returns TensorStore's JSON for a slice: the same rows of every block, one after the other."""
    where = leaf.slice
    assert where is not None
    maps: list[dict[str, Any]] = [{"input_dimension": dim} for dim in range(len(leaf.shape))]
    if whole.shards(where.dim) == 1:
        maps[where.dim]["offset"] = where.start
    else:
        first = np.arange(whole.shards(where.dim)) * whole.block[where.dim] + where.start
        rows = (first[:, None] + np.arange(where.size)).reshape(
            [-1 if dim == where.dim else 1 for dim in range(len(maps))]
        )
        maps[where.dim] = {"index_array": rows.tolist()}
    return {"input_inclusive_min": [0] * len(maps), "input_exclusive_max": list(leaf.shape), "output": maps}


def _with_sharding(arg: Any, sharding: NamedSharding) -> type_handlers.ArrayRestoreArgs:
    """Returns plain restore args with another sharding, whatever class of restore args was given."""
    fields = {
        field.name: getattr(arg, field.name)
        for field in dataclasses.fields(type_handlers.ArrayRestoreArgs)
        if hasattr(arg, field.name)
    }
    return type_handlers.ArrayRestoreArgs(**{**fields, "sharding": sharding, "mesh": None, "mesh_axes": None})


def as_carried(data: jax.Array, device: jax.Device, block: Block) -> jax.Array:
    """Returns one device's shard in the form in which its block is handed in."""
    if data.ndim and block.carried_dtype == block.dtype:
        return data
    # Through the host: an eager reshape or cast would run on whatever mesh the caller has set (google/orbax #3184).
    return jax.device_put(np.asarray(data).reshape(block.carried_shape).view(block.carried_dtype), device)
