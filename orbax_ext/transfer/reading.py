"""Reading a replica through Orbax's own `ArrayHandler.deserialize`, and the zeros of those who do not read."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest
from orbax_ext.transfer.exchange import Block
from orbax_ext.upstream.array_handler import read_view

OnDevices = Mapping[jax.Device, jax.Array]


@dataclasses.dataclass(frozen=True)
class Errand:
    """One thing to read: a leaf or a slice of it, sharded as told, as one block per device."""

    wish: LeafRequest
    leaf: Leaf  # the wish's, or a slice of it
    sharding: NamedSharding
    block: Block


async def read(handler: type_handlers.ArrayHandler, errands: Sequence[Errand]) -> list[jax.Array]:
    """Reads this process's shards of what is asked for."""
    whole = [errand for errand in errands if errand.leaf.slice is None]
    sliced = [errand for errand in errands if errand.leaf.slice is not None]
    arrays, *views = await asyncio.gather(_read_whole(handler, whole), *(_read_slice(handler, each) for each in sliced))
    found = {id(errand): array for errand, array in zip([*whole, *sliced], [*arrays, *views], strict=True)}
    return [found[id(errand)] for errand in errands]


def as_blocks(arrays: Sequence[jax.Array], errands: Sequence[Errand]) -> list[OnDevices]:
    """What was read, as a block on each of this process's devices."""
    return [
        {shard.device: _as_carried(shard, errand.block) for shard in array.addressable_shards}
        for array, errand in zip(arrays, errands, strict=True)
    ]


async def _read_whole(handler: type_handlers.ArrayHandler, errands: Sequence[Errand]) -> Sequence[jax.Array]:
    if not errands:
        return []
    args = [as_array_args(errand.wish.arg, errand.sharding) for errand in errands]
    return await type_handlers.ArrayHandler.deserialize(handler, [errand.wish.info for errand in errands], args)


async def _read_slice(handler: type_handlers.ArrayHandler, errand: Errand) -> jax.Array:
    wish, leaf = errand.wish, errand.leaf
    return await read_view(
        handler,
        wish.info,
        wish.arg,
        errand.sharding,
        stored_shape=wish.leaf.shape,
        transform=_view(wish.leaf, leaf),
        shape=leaf.shape,
    )


def _view(whole: Leaf, leaf: Leaf) -> dict[str, Any]:
    """TensorStore's words for a slice: the same rows of every block, one after the other."""
    part = leaf.slice
    assert part is not None
    maps: list[dict[str, Any]] = [{"input_dimension": dim} for dim in range(len(leaf.shape))]
    if whole.shards(part.dim) == 1:
        maps[part.dim]["offset"] = part.start
    else:
        first = np.arange(whole.shards(part.dim)) * whole.block[part.dim] + part.start
        rows = (first[:, None] + np.arange(part.size)).reshape(
            [-1 if dim == part.dim else 1 for dim in range(len(maps))]
        )
        maps[part.dim] = {"index_array": rows.tolist()}
    return {"input_inclusive_min": [0] * len(maps), "input_exclusive_max": list(leaf.shape), "output": maps}


def as_array_args(arg: Any, sharding: Any) -> type_handlers.ArrayRestoreArgs:
    """The same wish with another sharding, whatever class of restore args it came in."""
    wish = {
        field.name: getattr(arg, field.name)
        for field in dataclasses.fields(type_handlers.ArrayRestoreArgs)
        if hasattr(arg, field.name)
    }
    return type_handlers.ArrayRestoreArgs(**{**wish, "sharding": sharding, "mesh": None, "mesh_axes": None})


class Zeros:
    """Zeros for the devices of one replica, made by a program that is compiled ahead of time."""

    def __init__(self, block: Block, shape: tuple[int, ...], sharding: NamedSharding) -> None:
        """`shape` is that of the whole leaf; `sharding` is on the replica's mesh."""
        self._mesh = sharding.mesh

        def create_zeros() -> jax.Array:
            return jnp.zeros(shape or block.carried_shape, block.carried_dtype)

        with mesh_lib.scope(self._mesh):
            self._program = jax.jit(create_zeros, out_shardings=sharding).lower().compile()

    def make(self) -> OnDevices:
        with mesh_lib.scope(self._mesh):
            array = self._program()
        return {shard.device: shard.data for shard in array.addressable_shards}


@functools.lru_cache(maxsize=256)
def zeros(block: Block, shape: tuple[int, ...], sharding: NamedSharding) -> Zeros:
    """Such zeros, by the same program for every leaf and restore."""
    return Zeros(block, shape, sharding)


def _as_carried(shard: Any, block: Block) -> jax.Array:
    if shard.data.ndim and block.carried_dtype == block.dtype:
        return shard.data
    # By way of the host: an eager reshape or cast would run on whatever mesh the caller has set.
    return jax.device_put(np.asarray(shard.data).reshape(block.carried_shape).view(block.carried_dtype), shard.device)
