"""The collectives that carry data from the replica that has it to the others, bit for bit.

Programs run on a private mesh with two axes: "replica", and "rest" for the position inside a replica. A device's
share of a leaf (a block) is all they see, so neither the caller's mesh, axis types nor specs matter to them, and
leaves with equal blocks share a program however they are sharded.

Every block travels as unsigned integers of the same width. Floating-point sums would turn -0.0 into +0.0, quiet
signalling NaNs and flush denormals, and XLA widens small types on some backends; sums of integers of which all but
one are zero are exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_ext import mesh as mesh_lib

_EVERYWHERE = P(("replica", "rest"))


@dataclasses.dataclass(frozen=True)
class Block:
    """One device's share of a leaf: what arrives, and in what form it is handed in."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """A scalar is handed in as a vector of one element."""
        return self.shape or (1,)

    @property
    def carried_dtype(self) -> Any:
        """Types of less than a byte are handed in as bytes: their layout in memory depends on who made them."""
        return jnp.dtype("uint8") if _bits(self.dtype) < 8 else self.dtype


class Exchange:
    """The programs of one mesh and set of replica axes. Compile and connect first; `run` then only moves data."""

    def __init__(self, devices: np.ndarray) -> None:
        """`devices` is a table with a row for each replica, as `mesh.by_replica` makes it."""
        self._mesh = Mesh(devices, ("replica", "rest"))
        self._sharding = NamedSharding(self._mesh, _EVERYWHERE)
        self._programs: dict[tuple[Block, ...], Any] = {}

    def compile(self, blocks: tuple[Block, ...]) -> None:
        """Compiles the program for these blocks, unless it is there already."""
        if blocks in self._programs:
            return
        body = jax.shard_map(
            functools.partial(_broadcast, blocks),
            mesh=self._mesh,
            in_specs=_EVERYWHERE,
            out_specs=tuple(P("rest") if block.shape else P() for block in blocks),
            check_vma=False,  # the blocks of a "replica" column differ until the sum
        )
        arguments = [
            jax.ShapeDtypeStruct(self._global_shape(block), block.carried_dtype, sharding=self._sharding)
            for block in blocks
        ]
        with mesh_lib.scope(self._mesh):
            self._programs[blocks] = jax.jit(body, donate_argnums=range(len(blocks))).lower(*arguments).compile()

    def connect(self) -> None:
        """Opens the communicators by a sum over one element, and waits for it.

        A communicator that is opened when the first to arrive needs it gives the last one only 30 s on some backends
        (google/orbax #3181); one that is open already waits.
        """
        blocks = (Block((1,), jnp.dtype("uint32")),)
        self.compile(blocks)
        nothing = {device: jax.device_put(np.zeros(1, np.uint32), device) for device in self._mesh.local_devices}
        (answer,) = self.run(blocks, [nothing])
        jax.block_until_ready(list(answer.values()))

    def run(
        self, blocks: tuple[Block, ...], contributions: Sequence[Mapping[jax.Device, jax.Array]]
    ) -> list[dict[jax.Device, jax.Array]]:
        """Starts the exchange and returns, for each block, the result on each of this process's devices.

        Contributions are data on the devices of the replica that has it and zeros on all others. They are used up.
        """
        arguments = [
            jax.make_array_from_single_device_arrays(
                self._global_shape(block), self._sharding, [there[device] for device in self._mesh.local_devices]
            )
            for block, there in zip(blocks, contributions, strict=True)
        ]
        with mesh_lib.scope(self._mesh):
            results = self._programs[blocks](*arguments)
        return [{shard.device: shard.data for shard in result.addressable_shards} for result in results]

    def _global_shape(self, block: Block) -> tuple[int, ...]:
        """All devices' blocks, one after the other along the first dimension."""
        return (self._mesh.size * block.carried_shape[0], *block.carried_shape[1:])


def _broadcast(blocks: Sequence[Block], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    summed = lax.psum(tuple(_encode(array) for array in arrays), "replica")
    return tuple(_decode(words, block) for words, block in zip(summed, blocks, strict=True))


def _encode(array: jax.Array) -> jax.Array:
    """The same bits as unsigned integers."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([_encode(lax.real(array)), _encode(lax.imag(array))])
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    return lax.bitcast_convert_type(array, f"uint{_bits(array.dtype)}")


def _decode(words: jax.Array, block: Block) -> jax.Array:
    dtype = jnp.dtype(block.dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = Block(block.shape, np.zeros(0, dtype).real.dtype)
        return lax.complex(_decode(words[0], part), _decode(words[1], part))
    words = words.reshape(block.shape)
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    return lax.bitcast_convert_type(words.astype(f"uint{_bits(dtype)}"), dtype)


def _bits(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 8
    return int(jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits)
