"""Reading a replica through Orbax's own `ArrayHandler.deserialize`, and the zeros of those who do not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext.exchange import Block

OnDevices = Mapping[jax.Device, jax.Array]


async def read(
    handler: type_handlers.ArrayHandler,
    infos: Sequence[Any],
    args: Sequence[Any],
    shardings: Sequence[NamedSharding],
    blocks: Sequence[Block],
) -> list[OnDevices]:
    """Reads this process's shards of the leaves, sharded as told; each leaf as one block per device."""
    if not infos:
        return []
    told = [as_array_args(arg, sharding) for arg, sharding in zip(args, shardings, strict=True)]
    arrays = await type_handlers.ArrayHandler.deserialize(handler, infos, told)
    return [
        {shard.device: _as_carried(shard, block) for shard in array.addressable_shards}
        for array, block in zip(arrays, blocks, strict=True)
    ]


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

    def __init__(self, blocks: Sequence[Block], shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding]):
        """`shapes` are those of whole leaves; `shardings` are all on the same replica mesh."""
        self._mesh = shardings[0].mesh
        outputs = tuple(
            jax.ShapeDtypeStruct(shape or (1,), block.carried_dtype, sharding=sharding)
            for block, shape, sharding in zip(blocks, shapes, shardings, strict=True)
        )

        def create_zeros() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(out.shape, out.dtype) for out in outputs)

        with mesh_lib.scope(self._mesh):
            jitted = jax.jit(create_zeros, out_shardings=tuple(out.sharding for out in outputs))
            self._program = jitted.lower().compile()

    def make(self) -> list[OnDevices]:
        with mesh_lib.scope(self._mesh):
            arrays = self._program()
        return [{shard.device: shard.data for shard in array.addressable_shards} for array in arrays]


def _as_carried(shard: Any, block: Block) -> jax.Array:
    if shard.data.ndim and block.carried_dtype == block.dtype:
        return shard.data
    # By way of the host: an eager reshape or cast would run on whatever mesh the caller has set.
    return jax.device_put(np.asarray(shard.data).reshape(block.carried_shape).view(block.carried_dtype), shard.device)
