"""Putting the slices of a large leaf together, each where it belongs as soon as it has arrived."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_ext import mesh as mesh_lib
from orbax_ext.plan import Slice
from orbax_ext.transfer.exchange import Block, decode, encode
from orbax_ext.transfer.reading import OnDevices

_EACH = P("device")
_START = np.dtype(np.int32)


_Words = tuple[jax.Array, ...]


class Assembler:
    """Programs that write slices into whole blocks in place, on each device of this process by itself.

    Like what travels, the blocks are unsigned integers until they are complete: XLA's CPU backend widens bfloat16 even
    to copy it, which changes NaNs.
    """

    def __init__(self, block: Block, part: Block, dim: int, devices: tuple[jax.Device, ...]) -> None:
        self._mesh = Mesh(np.array(devices), ("device",))
        self._sharding = NamedSharding(self._mesh, _EACH)

        def begin() -> _Words:
            return encode(jnp.zeros(block.shape, block.dtype))

        def place(whole: _Words, piece: jax.Array, start: jax.Array) -> _Words:
            pairs = zip(whole, encode(piece), strict=True)
            return tuple(lax.dynamic_update_slice_in_dim(words, new, start[0], dim) for words, new in pairs)

        def finish(whole: _Words) -> jax.Array:
            return decode(whole, block)

        with mesh_lib.scope(self._mesh):
            self._begin = self._on_each(begin).lower().compile()
            whole = jax.eval_shape(self._on_each(begin))
            words = tuple(self._abstract(each.shape, each.dtype) for each in whole)
            pieces = self._abstract(self._global_shape(part.shape), part.dtype)
            starts = self._abstract((len(devices),), _START)
            self._place = self._on_each(place, donate=0).lower(words, pieces, starts).compile()
            self._finish = self._on_each(finish, donate=0).lower(words).compile()

    def begin(self) -> _Words:
        """Whole blocks with nothing in them yet."""
        with mesh_lib.scope(self._mesh):
            return self._begin()

    def place(self, whole: _Words, part: Slice, pieces: OnDevices) -> _Words:
        """The same blocks with a slice written into them; `whole` is used up."""
        starts = np.full(self._mesh.size, part.start, _START)
        there = [pieces[device] for device in self._mesh.devices]
        with mesh_lib.scope(self._mesh):
            piece = jax.make_array_from_single_device_arrays(self._global_shape(there[0].shape), self._sharding, there)
            return self._place(whole, piece, jax.device_put(starts, self._sharding))

    def finish(self, whole: _Words) -> OnDevices:
        """What was put together, by device; `whole` is used up."""
        with mesh_lib.scope(self._mesh):
            array = self._finish(whole)
        return {shard.device: shard.data for shard in array.addressable_shards}

    def _on_each(self, function: Any, donate: int | tuple[()] = ()) -> Any:
        body = jax.shard_map(function, mesh=self._mesh, in_specs=_EACH, out_specs=_EACH, check_vma=False)
        return jax.jit(body, donate_argnums=donate)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def _global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self._mesh.size * shape[0], *shape[1:])


@functools.lru_cache(maxsize=64)
def assembler(block: Block, part: Block, dim: int, devices: tuple[jax.Device, ...]) -> Assembler:
    """An assembler, the same one for every leaf and restore: its programs are compiled once."""
    return Assembler(block, part, dim, devices)
