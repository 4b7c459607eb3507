"""The collectives that carry blocks from the replicas that have them to the others, bit for bit.

Programs run on a private mesh with two axes: "replica", and "rest" for the position inside a replica. They see only
blocks, so neither the caller's mesh, axis types nor specs matter to them, and leaves with equal blocks share a program
however they are sharded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_ext import mesh as mesh_lib
from orbax_ext.transfer.blocks import Block, DeviceBlocks, decode, encode

_EVERYWHERE = P(("replica", "rest"))
_MOVED_AS_THEY_ARE = ("float32", "int32", "uint32")  # no backend widens them, and a move does not compute
_MOST_PROGRAMS = 256  # kept for later restores; more than one needs, unless it deals again very often


@dataclasses.dataclass(frozen=True)
class SumOp:
    """One replica has the block, the others zeros; all receive the block."""

    block: Block
    uses_up_operand = True

    @property
    def operand(self) -> Block:
        return self.block

    def outputs(self, replicas: int) -> tuple[Block, ...]:
        return (self.block,)

    def apply(self, operand: jax.Array) -> tuple[jax.Array, ...]:
        summed = lax.psum(encode(operand), "replica")
        return (decode(summed, self.block),)


@dataclasses.dataclass(frozen=True)
class GatherOp:
    """Every replica has a piece; all receive the blocks that the pieces make, one for each lane."""

    block: Block
    piece: tuple[int, ...]  # shape of one replica's piece
    sizes: tuple[int, ...]  # of the replica axes
    dims: tuple[int | None, ...]  # for each replica axis, the dimension that it cuts; None if it is a lane
    uses_up_operand = False

    @property
    def operand(self) -> Block:
        return Block(self.piece, self.block.dtype)

    @property
    def lanes(self) -> int:
        return math.prod(size for size, dim in zip(self.sizes, self.dims, strict=True) if dim is None)

    def outputs(self, replicas: int) -> tuple[Block, ...]:
        return (self.block,) * self.lanes

    def apply(self, operand: jax.Array) -> tuple[jax.Array, ...]:
        gathered = [lax.all_gather(words, "replica") for words in encode(operand)]
        blocks = zip(*(self._assemble(pieces) for pieces in gathered), strict=True)
        return tuple(decode(words, self.block) for words in blocks)

    def _assemble(self, pieces: jax.Array) -> list[jax.Array]:
        """Returns the block of each lane, from an array of shape (replica, *piece)."""
        axes = range(len(self.sizes))
        lanes = [axis for axis in axes if self.dims[axis] is None]
        order = list(lanes)
        for dim in range(len(self.piece)):
            order += [axis for axis in axes if self.dims[axis] == dim] + [len(self.sizes) + dim]
        table = pieces.reshape(*self.sizes, *self.piece).transpose(order)
        return list(table.reshape(self.lanes, *self.block.shape))


@dataclasses.dataclass(frozen=True)
class PackOp:
    """Every replica has a vector of words; all receive all of them, one after the other."""

    words: int
    uses_up_operand = False

    @property
    def operand(self) -> Block:
        return Block((self.words,), jnp.dtype("uint32"))

    def outputs(self, replicas: int) -> tuple[Block, ...]:
        return (Block((replicas * self.words,), jnp.dtype("uint32")),)

    def apply(self, operand: jax.Array) -> tuple[jax.Array, ...]:
        return (lax.all_gather(operand, "replica", tiled=True),)


@dataclasses.dataclass(frozen=True)
class RelayOp:
    """Some devices have blocks that others lack; blocks are moved, then summed along the columns if there are senders.

    Positions are those of the devices in the table, row by row. Without a sum only the receivers of moves get a block;
    the other devices get zeros, and go on with what they have. Copying that through the program would cost every host
    the time to write its whole state once more.
    """

    block: Block
    moves: tuple[tuple[int, int], ...]  # from a position to a position
    senders: tuple[int, ...]  # one for each column; empty: no sum
    devices: int

    @property
    def uses_up_operand(self) -> bool:
        return bool(self.senders)

    @property
    def operand(self) -> Block:
        return self.block

    def outputs(self, replicas: int) -> tuple[Block, ...]:
        return (self.block,)

    def apply(self, operand: jax.Array) -> tuple[jax.Array, ...]:
        if not self.senders and operand.dtype.name in _MOVED_AS_THEY_ARE:
            # XLA's CPU backend would copy each device's block to convert it to integers, and copy it again afterwards.
            return (self._moved(operand).reshape(self.block.shape),)
        words = encode(operand)
        arrived = tuple(map(self._moved, words)) if self.moves else words
        if not self.senders:
            return (decode(arrived, self.block),)
        arrives, sends = self._is_one_of([receiver for _, receiver in self.moves]), self._is_one_of(self.senders)
        words = tuple(jnp.where(arrives, new, old) for new, old in zip(arrived, words, strict=True))
        words = tuple(lax.psum(jnp.where(sends, part, jnp.zeros_like(part)), "replica") for part in words)
        return (decode(words, self.block),)

    def _moved(self, part: jax.Array) -> jax.Array:
        return lax.ppermute(part, ("replica", "rest"), self.moves)

    def _is_one_of(self, positions: Sequence[int]) -> jax.Array:
        """Returns on each device whether it is at one of the positions."""
        flags = np.zeros(self.devices, np.bool_)
        flags[list(positions)] = True
        return jnp.asarray(flags)[lax.axis_index(("replica", "rest"))]


Op = SumOp | GatherOp | PackOp | RelayOp

_SIGNAL = SumOp(Block((1,), jnp.dtype("uint32")))  # next to nothing


@functools.lru_cache(maxsize=8)
def exchange_among(replicas: tuple[tuple[jax.Device, ...], ...]) -> Exchange:
    """Returns the exchange among replicas; the same one for every restore, so that programs are compiled once."""
    return Exchange(np.array(replicas))


class Exchange:
    """The programs among one set of replicas. Compile and connect first; `run` then only moves data."""

    def __init__(self, devices: np.ndarray) -> None:
        """`devices` is a table with a row for each replica, as `mesh.by_replica` returns it."""
        self._mesh = Mesh(devices, ("replica", "rest"))
        self._sharding = NamedSharding(self._mesh, _EVERYWHERE)
        self._programs: dict[tuple[Op, ...], Any] = {}
        self._lock = threading.Lock()  # a restore that is read ahead compiles in another thread than its own

    def is_compiled(self, ops: tuple[Op, ...]) -> bool:
        return ops in self._programs

    def compile_connection(self) -> None:
        """Compiles what `connect` runs."""
        self.compile((_SIGNAL,))

    def compile(self, ops: tuple[Op, ...]) -> Any:
        """Returns the program for these operations; compiles it unless it is compiled already."""
        with self._lock:
            if ops not in self._programs:
                self._programs[ops] = self._compiled(ops)
            return self._programs[ops]

    def _compiled(self, ops: tuple[Op, ...]) -> Any:
        while len(self._programs) >= _MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        results = [block for op in ops for block in op.outputs(len(self._mesh.devices))]

        def program(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(out for op, operand in zip(ops, operands, strict=True) for out in op.apply(operand))

        body = jax.shard_map(
            program,
            mesh=self._mesh,
            in_specs=_EVERYWHERE,
            out_specs=tuple(P("rest") if block.shape else P() for block in results),
            check_vma=False,  # the blocks of a "replica" column differ until they are exchanged
        )
        arguments = [
            jax.ShapeDtypeStruct(self._global_shape(op.operand), op.operand.carried_dtype, sharding=self._sharding)
            for op in ops
        ]
        reusable = tuple(at for at, op in enumerate(ops) if op.uses_up_operand)
        with mesh_lib.scope(self._mesh):
            return jax.jit(body, donate_argnums=reusable).lower(*arguments).compile()

    def connect(self) -> None:
        """Opens the communicators by a sum over one element, and waits for it.

        On some backends a communicator that is opened by the first exchange gives a late process only 30 s
        (google/orbax #3181). One that is open already waits for it.
        """
        self._run_on_zeros(_SIGNAL)

    def connect_moves(self, sums: bool) -> None:
        """Does the same for moves between any two devices of the table and, if asked, for sums along its columns."""
        rows, columns = self._mesh.devices.shape
        ring = tuple((at, (at + 1) % self._mesh.size) for at in range(self._mesh.size))
        senders = tuple(range(columns)) if sums and rows > 1 else ()
        self._run_on_zeros(RelayOp(_SIGNAL.block, ring, senders, self._mesh.size))

    def _run_on_zeros(self, op: Op) -> None:
        self.compile((op,))
        (answer,) = self.run((op,), [self._zeros(op.operand)])
        jax.block_until_ready(list(answer.values()))

    def run(self, ops: tuple[Op, ...], operands: Sequence[DeviceBlocks]) -> list[DeviceBlocks]:
        """Starts the exchange and returns the blocks of each output. The operands of sums are used up.

        Compiles first what is not compiled: a process that is late is not waited for, whatever it lacks.
        """
        try:
            results = self._start(ops, operands)
        except Exception:
            self.take_part(ops)
            raise
        return [{shard.device: shard.data for shard in result.addressable_shards} for result in results]

    def take_part(self, ops: tuple[Op, ...]) -> None:
        """Takes part with zeros, because the other processes are inside: without this one they can't leave.

        Waits for the end, so that the next exchange of this process does not begin before it.
        """
        jax.block_until_ready(self._start(ops, [self._zeros(op.operand) for op in ops]))

    def _start(self, ops: tuple[Op, ...], operands: Sequence[DeviceBlocks]) -> Any:
        program = self._programs.get(ops) or self.compile(ops)
        arguments = [
            jax.make_array_from_single_device_arrays(
                self._global_shape(op.operand), self._sharding, [blocks[device] for device in self._mesh.local_devices]
            )
            for op, blocks in zip(ops, operands, strict=True)
        ]
        with mesh_lib.scope(self._mesh):
            return program(*arguments)

    def _zeros(self, block: Block) -> DeviceBlocks:
        zeros = np.zeros(block.carried_shape, block.carried_dtype)
        return {device: jax.device_put(zeros, device) for device in self._mesh.local_devices}

    def _global_shape(self, block: Block) -> tuple[int, ...]:
        """Returns the shape of all devices' blocks, one after the other along the first dimension."""
        return (self._mesh.size * block.carried_shape[0], *block.carried_shape[1:])
