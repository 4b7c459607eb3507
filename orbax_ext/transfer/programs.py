"""Programs that run on this process's devices alone: zeros for those that do not read, and slices put together."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_ext import mesh as mesh_lib
from orbax_ext.meeting.threads import begin, in_thread
from orbax_ext.plan import Slice
from orbax_ext.transfer.blocks import Block, DeviceBlocks, decode, encode
from orbax_ext.upstream import runtime

T = TypeVar("T")

_EACH = P("device")
_START = np.dtype(np.int32)

Words = tuple[jax.Array, ...]


class Zeros:
    """Zeros for the devices of one replica, made by a program that is compiled ahead of time."""

    def __init__(self, block: Block, shape: tuple[int, ...], sharding: NamedSharding) -> None:
        """`shape` is that of the whole leaf; `sharding` is on the replica's mesh."""
        self._mesh = sharding.mesh

        def create_zeros() -> jax.Array:
            return jnp.zeros(shape or block.carried_shape, block.carried_dtype)

        with mesh_lib.scope(self._mesh):
            self._program = jax.jit(create_zeros, out_shardings=sharding).lower().compile()

    def make(self) -> DeviceBlocks:
        with mesh_lib.scope(self._mesh):
            array = self._program()
        return {shard.device: shard.data for shard in array.addressable_shards}


@functools.lru_cache(maxsize=256)
def make_zeros(block: Block, shape: tuple[int, ...], sharding: NamedSharding) -> Zeros:
    """Returns zeros that share one program for every leaf and restore."""
    return Zeros(block, shape, sharding)


class Assembler:
    """Programs that write slices into whole blocks in place, on each device of this process by itself.

    Like blocks that travel, blocks of some types are unsigned integers until they are complete: XLA's CPU backend
    widens bfloat16 even to copy it, which changes NaNs. Others are put together in their own type: to convert a whole
    block takes the memory of another one.
    """

    def __init__(self, whole: Block, piece: Block, dim: int, devices: tuple[jax.Device, ...]) -> None:
        """`piece` is the block of one slice, which cuts dimension `dim` of the whole block."""
        self._mesh = Mesh(np.array(devices), ("device",))
        self._sharding = NamedSharding(self._mesh, _EACH)
        as_it_is = is_copied_exactly(whole.dtype, devices[0].platform)

        def words_of(array: jax.Array) -> Words:
            return (array,) if as_it_is else encode(array)

        def begin() -> Words:
            return words_of(jnp.zeros(whole.shape, whole.dtype))

        def place(blocks: Words, pieces: jax.Array, start: jax.Array) -> Words:
            pairs = zip(blocks, words_of(pieces), strict=True)
            return tuple(lax.dynamic_update_slice_in_dim(words, new, start[0], dim) for words, new in pairs)

        def finish(blocks: Words) -> jax.Array:
            return decode(blocks, whole)

        with mesh_lib.scope(self._mesh):
            words = tuple(self._abstract(one.shape, one.dtype) for one in jax.eval_shape(self._on_each(begin)))
            pieces = self._abstract(self._global_shape(piece.shape), piece.dtype)
            starts = self._abstract((len(devices),), _START)
            self._is_whole = piece.shape == whole.shape
            if self._is_whole:
                self._words_of = None if as_it_is else self._on_each(words_of).lower(pieces).compile()
            else:
                self._begin = self._on_each(begin).lower().compile()
                self._place = self._on_each(place, donate=0).lower(words, pieces, starts).compile()
            # Nothing is donated: XLA would convert in place by converting elsewhere and copying back.
            self._finish = None if as_it_is else self._on_each(finish).lower(words).compile()

    def place(self, blocks: Words | None, where: Slice, pieces: DeviceBlocks) -> Words:
        """Returns the blocks with a slice written into them; `blocks` is used up.

        None stands for blocks with nothing in them yet. A piece that is the whole block, with holes, comes first.
        """
        ordered = [pieces[device] for device in self._mesh.devices]
        shape = self._global_shape(ordered[0].shape)
        with mesh_lib.scope(self._mesh):
            joined = jax.make_array_from_single_device_arrays(shape, self._sharding, ordered)
            if self._is_whole:
                assert blocks is None
                return (joined,) if self._words_of is None else self._words_of(joined)
            starts = jax.device_put(np.full(self._mesh.size, where.start, _START), self._sharding)
            return self._place(self._begin() if blocks is None else blocks, joined, starts)

    def finish(self, blocks: Words) -> DeviceBlocks:
        """Returns the blocks in their own dtype; they may be the same memory as `blocks`."""
        if self._finish is None:
            (array,) = blocks
        else:
            with mesh_lib.scope(self._mesh):
                array = self._finish(blocks)
        return {shard.device: shard.data for shard in array.addressable_shards}

    def _on_each(self, function: Any, donate: int | tuple[()] = ()) -> Any:
        body = jax.shard_map(function, mesh=self._mesh, in_specs=_EACH, out_specs=_EACH, check_vma=False)
        return jax.jit(body, donate_argnums=donate)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def _global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self._mesh.size * shape[0], *shape[1:])


def is_copied_exactly(dtype: Any, platform: str) -> bool:
    """Returns whether XLA is known to copy each bit of arrays of this type, also those of NaNs, -0.0 and denormals."""
    if jnp.dtype(dtype).name in ("bool", "float32"):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return runtime.bits(dtype) >= 8
    # A TPU has no float64.
    return platform == "cpu" and jnp.dtype(dtype).name in ("float64", "complex64", "complex128")


@functools.lru_cache(maxsize=64)
def make_assembler(whole: Block, piece: Block, dim: int, devices: tuple[jax.Device, ...]) -> Assembler:
    """Returns an assembler that shares its programs for every leaf and restore."""
    return Assembler(whole, piece, dim, devices)


async def run_in_thread(function: Callable[[], T], limit: float) -> T:
    """Calls a function that runs programs in a thread, for at most `limit` seconds."""
    return await in_thread(_as_here(function), limit=limit)


def begin_in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Calls a function that runs programs in a thread, which starts now and goes on if nobody waits for the result."""
    return begin(_as_here(function))


def start_thread(function: Callable[[], Any]) -> None:
    """Calls a function that runs programs in a thread that nobody waits for; its errors only go to the log."""
    call = _as_here(function)

    def run() -> None:
        try:
            call()
        except Exception as error:
            logging.info("orbax_ext: an exchange of a restore that has failed: %s", error)

    threading.Thread(target=run, daemon=True, name="orbax_ext exchange").start()


def _as_here(function: Callable[[], T]) -> Callable[[], T]:
    """Returns a function for another thread, where `with jax.enable_x64(True)` of this one would not count."""
    wide = jax.config.jax_enable_x64

    @functools.wraps(function)
    def call() -> T:
        with jax.enable_x64(wide):
            return function()

    return call
