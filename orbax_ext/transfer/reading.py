"""Reads leaves, and slices of leaves, through Orbax's own `ArrayHandler.deserialize`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest
from orbax_ext.storage.s3.errors import reads_explained
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.upstream.array_handler import read_view


@dataclasses.dataclass(frozen=True)
class ReadItem:
    """One leaf, or a slice of one, that this process reads."""

    index: int  # of the leaf or slice in the plan
    request: LeafRequest  # of the whole leaf
    leaf: Leaf  # the request's leaf, or a slice of it
    sharding: NamedSharding  # to read it with
    block: Block  # that it makes on each device


async def read(handler: type_handlers.ArrayHandler, items: Sequence[ReadItem]) -> list[jax.Array]:
    """Reads this process's shards of every item."""
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
    return await type_handlers.ArrayHandler.deserialize(handler, [item.request.info for item in items], args)


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
