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


def _as_carried(shard: Any, block: Block) -> jax.Array:
    if shard.data.ndim and block.carried_dtype == block.dtype:
        return shard.data
    # By way of the host: an eager reshape or cast would run on whatever mesh the caller has set.
    return jax.device_put(np.asarray(shard.data).reshape(block.carried_shape).view(block.carried_dtype), shard.device)
