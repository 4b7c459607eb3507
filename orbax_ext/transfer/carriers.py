"""How each kind of bundle is read, handed in and taken out of an exchange, on this process: one class per kind."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from orbax_ext import mesh as mesh_lib
from orbax_ext.plan import Bundle, ColumnSum, LaneBatch, Leaf, LeafBatch, Pack, Sum, piece_shape
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer import packing, programs
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.boxes import ReadItem, aligned_empty
from orbax_ext.transfer.collectives import GatherOp, Op, PackOp, SumOp
from orbax_ext.transfer.reading import Blocks


class PlannedLeaves:
    """The leaves of a plan, slices included, with what was asked for."""

    def __init__(self, request: Request, leaves: Sequence[Leaf]) -> None:
        self._request = request
        self.leaves = leaves

    def request(self, index: int) -> LeafRequest:
        """Returns the request for a leaf; for a slice, that for the whole leaf."""
        where = self.leaves[index].slice
        return self._request.leaf_requests[index if where is None else where.leaf]

    def block(self, index: int) -> Block:
        leaf = self.leaves[index]
        return _block(leaf.block, leaf.dtype)


@functools.lru_cache(maxsize=256)
def _block(shape: tuple[int, ...], dtype: str) -> Block:
    return Block(shape, jnp.dtype(dtype))


class Replicas:
    """The replicas along some axes of a mesh, and those that this process has devices of."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.axes = axes
        mesh_of = functools.cache(lambda replica: mesh_lib.replica_mesh(mesh, axes, replica))
        # Thousands of leaves share a sharding.
        self._sharding = functools.cache(lambda whole, replica: mesh_lib.replica_sharding(whole, mesh_of(replica)))

    @functools.cached_property
    def table(self) -> tuple[tuple[jax.Device, ...], ...]:
        """All devices, a row for each replica."""
        return tuple(map(tuple, mesh_lib.by_replica(self.mesh, self.axes)))

    @functools.cached_property
    def of_device(self) -> dict[jax.Device, int]:
        """The replica that each of this process's devices belongs to."""
        return {device: row for row, devices in enumerate(self.table) for device in devices if is_local(device)}

    @functools.cached_property
    def column_of(self) -> dict[jax.Device, int]:
        """The column of the table that each of this process's devices is in."""
        return {device: at for devices in self.table for at, device in enumerate(devices) if is_local(device)}

    @functools.cached_property
    def here(self) -> list[int]:
        """The replicas that this process has devices of."""
        return sorted(set(self.of_device.values()))

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: self.mesh.shape[axis] for axis in self.axes}

    def sharding(self, leaf: LeafRequest, replica: int) -> NamedSharding:
        """Returns the sharding of a leaf on one replica's devices."""
        return self._sharding(leaf.sharding, replica)


class Carrier(abc.ABC):
    """What this process does for one bundle."""

    def __init__(self, leaves: PlannedLeaves, replicas: Replicas) -> None:
        self._leaves = leaves
        self._replicas = replicas

    @property
    @abc.abstractmethod
    def op(self) -> Op:
        """The bundle's part of the exchange program."""

    @abc.abstractmethod
    def items(self) -> list[ReadItem]:
        """Returns what this process reads for the bundle."""

    def reads(self) -> list[ReadItem]:
        """Returns the same with the memory to read into, where there is a place in what travels."""
        return self.items()

    @property
    def share_bytes(self) -> int:
        """The bytes that this process reads for the bundle."""
        return sum(item.device_bytes * len(item.sharding.addressable_devices) for item in self.items())

    @abc.abstractmethod
    def contribution(self, read: Mapping[int, Blocks]) -> Blocks:
        """Returns what this process hands in, from what it has read; anything in place of what it has not read."""

    @abc.abstractmethod
    def received(self, outputs: Iterator[DeviceBlocks]) -> Mapping[int, Blocks]:
        """Takes the bundle's outputs from those of the exchange; returns the blocks of every leaf."""

    def compile(self) -> None:  # noqa: B027, most need nothing
        """Compiles what the bundle needs beside the exchange program."""

    def _item(self, index: int, sharding: NamedSharding, block: Block) -> ReadItem:
        return ReadItem(index, self._leaves.request(index), self._leaves.leaves[index], sharding, block)

    def _shares(self, shares: Mapping[int, Sequence[int]]) -> list[ReadItem]:
        """Returns whole leaves that replicas read, of those replicas that are here."""
        return [
            self._item(leaf, self._replicas.sharding(self._leaves.request(leaf), replica), self._leaves.block(leaf))
            for replica in self._replicas.here
            for leaf in shares.get(replica, ())
        ]


class SumCarrier(Carrier):
    """A leaf that one replica reads; the others hand in zeros."""

    def __init__(self, bundle: Sum, leaves: PlannedLeaves, replicas: Replicas) -> None:
        super().__init__(leaves, replicas)
        self._leaf = bundle.leaf
        self._reader = bundle.reader

    @property
    def op(self) -> Op:
        return SumOp(self._leaves.block(self._leaf))

    def compile(self) -> None:
        self._zeros()

    def items(self) -> list[ReadItem]:
        return self._shares({self._reader: (self._leaf,)})

    def contribution(self, read: Mapping[int, Blocks]) -> Blocks:
        blocks: dict[jax.Device, Any] = dict(read.get(self._leaf, {}))
        for zeros in self._zeros():
            blocks.update(zeros.make())
        for device in self._replicas.of_device.keys() - blocks.keys():  # the reader's, if it has not read
            block = self._leaves.block(self._leaf)
            blocks[device] = np.zeros(block.carried_shape, block.carried_dtype)
        return blocks

    def received(self, outputs: Iterator[DeviceBlocks]) -> dict[int, DeviceBlocks]:
        return {self._leaf: next(outputs)}

    def _zeros(self) -> list[programs.Zeros]:
        """Returns zeros for each replica here that does not read, in the scope of its own mesh."""
        block, request = self._leaves.block(self._leaf), self._leaves.request(self._leaf)
        shape = self._leaves.leaves[self._leaf].shape
        others = [replica for replica in self._replicas.here if replica != self._reader]
        return [programs.make_zeros(block, shape, self._replicas.sharding(request, replica)) for replica in others]


class ColumnSumCarrier(Carrier):
    """A leaf of which each block has a reader of its own; everybody else hands in zeros for it."""

    def __init__(self, bundle: ColumnSum, leaves: PlannedLeaves, replicas: Replicas) -> None:
        super().__init__(leaves, replicas)
        self._leaf = bundle.leaf
        self._readers = bundle.readers

    @property
    def op(self) -> Op:
        return SumOp(self._leaves.block(self._leaf))

    def items(self) -> list[ReadItem]:
        """Returns all blocks of the leaf that are here, if this process reads one: almost always it then reads all."""
        if not any(map(self._reads, self._replicas.of_device)):
            return []
        sharding = self._leaves.request(self._leaf).sharding
        here = mesh_lib.replica_sharding(sharding, sharding.mesh)
        return [self._item(self._leaf, here, self._leaves.block(self._leaf))]

    def contribution(self, read: Mapping[int, Blocks]) -> Blocks:
        block, blocks = self._leaves.block(self._leaf), read.get(self._leaf, {})
        return {
            device: blocks[device]
            if self._reads(device) and device in blocks
            else np.zeros(block.carried_shape, block.carried_dtype)
            for device in self._replicas.of_device
        }

    def received(self, outputs: Iterator[DeviceBlocks]) -> dict[int, DeviceBlocks]:
        return {self._leaf: next(outputs)}

    def _reads(self, device: jax.Device) -> bool:
        return self._readers[self._replicas.column_of[device]] == self._replicas.of_device[device]


class LaneCarrier(Carrier):
    """Leaves with equal blocks, one for each lane; every replica reads a piece of the leaf of its lane."""

    def __init__(self, bundle: LaneBatch, leaves: PlannedLeaves, replicas: Replicas) -> None:
        super().__init__(leaves, replicas)
        self._bundle = bundle

    @property
    def op(self) -> GatherOp:
        block, dims = self._leaves.block(self._bundle.leaves[0]), dict(self._bundle.splits)
        sizes = self._replicas.sizes
        piece = piece_shape(block.shape, dims, sizes)
        return GatherOp(block, piece, tuple(sizes.values()), tuple(dims.get(axis) for axis in sizes))

    def items(self) -> list[ReadItem]:
        lanes = [
            (leaf, mesh_lib.replica_mesh(self._replicas.mesh, self._bundle.lanes, lane))
            for lane, leaf in enumerate(self._bundle.leaves)
        ]
        return [
            self._item(leaf, self._split(leaf, lane_mesh), self.op.operand)
            for leaf, lane_mesh in lanes
            if any(is_local(device) and not self._is_absent(device) for device in lane_mesh.devices.flat)
        ]

    def contribution(self, read: Mapping[int, Blocks]) -> Blocks:
        operand = self.op.operand
        blocks = {device: block for leaf in self._bundle.leaves for device, block in read.get(leaf, {}).items()}
        for device in self._replicas.of_device.keys() - blocks.keys():
            blocks[device] = aligned_empty(operand.carried_shape, operand.carried_dtype)
        return blocks

    def _is_absent(self, device: jax.Device) -> bool:
        return self._replicas.of_device[device] in self._bundle.absent

    def received(self, outputs: Iterator[DeviceBlocks]) -> dict[int, DeviceBlocks]:
        return {leaf: next(outputs) for leaf in self._bundle.leaves}

    def _split(self, leaf: int, lane_mesh: Mesh) -> NamedSharding:
        return mesh_lib.split_sharding(self._leaves.request(leaf).sharding, lane_mesh, self._bundle.splits)


class LeafBatchCarrier(Carrier):
    """Equal leaves of which each replica reads one or none."""

    def __init__(self, bundle: LeafBatch, leaves: PlannedLeaves, replicas: Replicas) -> None:
        super().__init__(leaves, replicas)
        self._bundle = bundle

    @property
    def op(self) -> GatherOp:
        block = self._leaves.block(self._bundle.leaves[0])
        return GatherOp(block, block.shape, (len(self._bundle.shares),), (None,))

    def items(self) -> list[ReadItem]:
        shares = enumerate(self._bundle.shares)
        return self._shares({replica: (leaf,) for replica, leaf in shares if leaf is not None})

    def contribution(self, read: Mapping[int, Blocks]) -> Blocks:
        operand = self.op.operand
        blocks = {device: block for leaf in self._bundle.leaves for device, block in read.get(leaf, {}).items()}
        for device in self._replicas.of_device.keys() - blocks.keys():
            blocks[device] = aligned_empty(operand.carried_shape, operand.carried_dtype)
        return blocks

    def received(self, outputs: Iterator[DeviceBlocks]) -> dict[int, DeviceBlocks]:
        arrived = [(leaf, next(outputs)) for leaf in self._bundle.shares]
        return {leaf: blocks for leaf, blocks in arrived if leaf is not None}


class PackCarrier(Carrier):
    """Many small leaves in one vector."""

    def __init__(self, bundle: Pack, leaves: PlannedLeaves, replicas: Replicas) -> None:
        super().__init__(leaves, replicas)
        self._bundle = bundle

    @property
    def op(self) -> Op:
        words = self._bundle.words
        return SumOp(Block((words,), jnp.dtype("uint32"))) if self._bundle.summed else PackOp(words)

    def items(self) -> list[ReadItem]:
        return self._shares(dict(enumerate(self._bundle.shares)))

    def reads(self) -> list[ReadItem]:
        buffers = self._vectors.buffers
        return [dataclasses.replace(item, buffers=buffers(item.index, item.block)) for item in self.items()]

    def contribution(self, read: Mapping[int, Blocks]) -> Blocks:
        return self._vectors.filled(read)

    @functools.cached_property
    def _vectors(self) -> packing.Vectors:
        """What this process hands in; leaves are read into it."""
        return packing.Vectors(self._bundle, self._replicas.of_device, self._leaves.leaves)

    def received(self, outputs: Iterator[DeviceBlocks]) -> Mapping[int, Blocks]:
        blocks = {leaf: self._leaves.block(leaf) for leaf in self._bundle.leaves}
        return packing.unpack(self._bundle, next(outputs), blocks, self._leaves.leaves)


_CARRIERS = {
    Sum: SumCarrier,
    ColumnSum: ColumnSumCarrier,
    LaneBatch: LaneCarrier,
    LeafBatch: LeafBatchCarrier,
    Pack: PackCarrier,
}


def make_carrier(bundle: Bundle, leaves: PlannedLeaves, replicas: Replicas) -> Carrier:
    """Returns the carrier of a bundle."""
    made: Carrier = _CARRIERS[type(bundle)](bundle, leaves, replicas)
    return made


def is_local(device: jax.Device) -> bool:
    """Returns whether a device belongs to this process."""
    return device.process_index == jax.process_index()
