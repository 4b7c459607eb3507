"""Counts the bytes that a plan reads and moves: all figures of bytes in reports and in the cost model are from here.

Bytes read are counted in memory, as leaves have them, except by `count`, which counts whole stored chunks. Bytes
received are those that devices get from devices of other processes, except in a `Load`, which counts bytes on links.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from orbax_ext.plan.chunks import ChunkedArray, ChunkReads
from orbax_ext.plan.holders import Columns, RelayGroup
from orbax_ext.plan.leaves import Leaf, itemsize
from orbax_ext.plan.planner import Group, RestorePlan, by_replicas
from orbax_ext.plan.topology import MeshInfo, infer_axes

_ITEMSIZE = 4  # of a dtype that is not known


@dataclasses.dataclass(frozen=True)
class Load:
    """What some leaves ask of the processes, for the cost model."""

    read: int = 0  # bytes, by the process that reads most
    read_by_all: int = 0
    link: int = 0  # bytes into the process that receives most, see `_Copies.over_links`
    arrays: int = 0  # that the process opens which opens most
    groups: int = 0


class Loads:
    """Counts the loads of groups that travel, and of leaves that are read directly."""

    def __init__(self, leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], processes: int) -> None:
        self._leaves = leaves
        self._meshes = meshes
        self._processes = processes
        self._copies = functools.cache(lambda mesh, axes: _Copies.on(meshes[mesh], axes))
        self._blocks = functools.cache(self._blocks_of)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """The bytes of each leaf's block; counted once, because there may be many leaves and many groups."""
        return [leaf.block_bytes for leaf in self._leaves]

    def travelling(self, groups: Sequence[Group]) -> Load:
        """Returns the load of groups that are read once and exchanged."""
        read, link, arrays = (np.zeros(self._processes) for _ in range(3))
        for (mesh, axes), equals in by_replicas(groups).items():
            copies = self._copies(mesh, axes)
            total = _Exchanged(equals, self._sizes, copies.replicas)
            # Shares of one pack differ, but those of many even out.
            even = (total.read - total.read_by_one).mean()
            read += copies.by_process((total.read_by_one + even)[copies.replica], self._processes)
            link += copies.by_process(copies.over_links(total.gathered, total.summed), self._processes)
            arrays += total.arrays_by_all + copies.by_process(copies.opened(total.arrays_by_one), self._processes)
        return Load(int(read.max()), int(read.sum()), int(link.max()), int(arrays.max()), len(groups))

    def direct(self, indices: Iterable[int]) -> Load:
        """Returns the load of leaves of which every process reads the blocks that it holds, each once."""
        read, arrays = self._held(indices)
        return Load(int(read.max()), int(read.sum()), arrays=int(arrays.max()))

    def held(self, indices: Iterable[int], process: int) -> int:
        """Returns the bytes of the blocks that one process holds of leaves, each block once."""
        read, _ = self._held(indices)
        return int(read[process])

    def _held(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes of leaves that processes hold, and in how many arrays, by process."""
        read, arrays = np.zeros(self._processes), np.zeros(self._processes)
        kinds: dict[tuple[int, frozenset[str]], list[int]] = defaultdict(list)  # thousands of leaves are of a few
        for leaf in (self._leaves[index] for index in indices):
            if leaf.mesh is None:
                read += _leaf_bytes(leaf)
                arrays += 1
            else:
                kinds[leaf.mesh, leaf.used_axes].append(leaf.block_bytes)
        for (mesh, used), sizes in kinds.items():
            held = self._blocks(mesh, used)
            read += held * sum(sizes)
            arrays += (held > 0) * len(sizes)
        return read, arrays

    def _blocks_of(self, mesh: int, used: frozenset[str]) -> np.ndarray:
        copies = self._copies(mesh, infer_axes(self._meshes[mesh], used))
        return copies.by_process(copies.first, self._processes)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that the devices of one process bring to an exchange, receive from other processes and send to them."""

    brought: int = 0
    received: int = 0
    sent: int = 0


def traffic_by_group(plan: RestorePlan, meshes: Sequence[MeshInfo], process: int) -> list[Traffic]:
    """Returns the traffic of one process for each group of a plan."""
    own = functools.cache(lambda mesh, axes: _Copies.on(meshes[mesh], axes).of_process(process))
    sizes = [leaf.block_bytes for leaf in plan.leaves]
    traffic = []
    for group in plan.groups:
        devices = own(group.mesh, group.axes)
        total = _Exchanged([group], sizes, devices.replicas)
        values = (total.read[devices.replica], devices.received(total.offered), devices.sent(total.offered))
        traffic.append(Traffic(*(int(value.sum()) for value in values)))
    return traffic


def relay_traffic(
    groups: Sequence[RelayGroup], tables: Mapping[int, Columns], leaves: Sequence[Leaf], process: int
) -> list[Traffic]:
    """Returns the traffic of one process for each group in which hosts send what they have loaded."""
    traffic = []
    for group in groups:
        columns, size = tables[group.leaves[0]], sum(leaves[leaf].block_bytes for leaf in group.leaves)
        own = columns.owners == process
        summed = [
            (sender, at)
            for sender in group.senders
            for at in range(sender % columns.count, len(own), columns.count)
            if at != sender
        ]
        pairs = [*group.moves, *summed]
        brought = size * sum(group.loaded[at] >= 0 for at in columns.of_process(process))
        received = size * sum(bool(own[receiver] and not own[sender]) for sender, receiver in pairs)
        sent = size * sum(bool(own[sender] and not own[receiver]) for sender, receiver in pairs)
        traffic.append(Traffic(brought, received, sent))
    return traffic


def bytes_by_step(plan: RestorePlan, meshes: Sequence[MeshInfo], processes: int) -> dict[int | None, int]:
    """Returns the bytes that all processes read for each group, and under None for leaves that are read directly."""
    steps: dict[int | None, int] = {
        number: sum(_leaf_bytes(plan.leaves[leaf]) for leaf in group.leaves) for number, group in enumerate(plan.groups)
    }
    blocks = functools.cache(lambda mesh, used: _Copies.on(meshes[mesh], infer_axes(meshes[mesh], used)).first.sum())
    steps[None] = 0
    for leaf in (plan.leaves[index] for index in plan.direct):
        if leaf.mesh is None:
            steps[None] += _leaf_bytes(leaf) * processes
        else:
            steps[None] += leaf.block_bytes * int(blocks(leaf.mesh, leaf.used_axes))
    return steps


@dataclasses.dataclass(frozen=True)
class Volumes:
    """Bytes by process, and by leaf over all processes."""

    read: np.ndarray  # from storage, by process
    received: np.ndarray  # from other processes, by process
    leaf_read: Mapping[int, int]  # leaf: bytes read by all processes together
    leaf_needed: Mapping[int, int]  # leaf: those of them that were asked for; the others are in the same chunks

    @property
    def total_read(self) -> int:
        return int(self.read.sum())

    @property
    def total_received(self) -> int:
        return int(self.received.sum())


def count(plan: RestorePlan, meshes: Sequence[MeshInfo], processes: int) -> Volumes:
    """Returns what a plan makes every process read, in whole chunks before compression, and receive."""
    read, received = np.zeros(processes), np.zeros(processes)
    leaf_read = {index: 0 for index, leaf in enumerate(plan.leaves) if leaf.slice is None}
    leaf_needed = dict(leaf_read)
    chunk_reads = [ChunkReads(mesh) for mesh in meshes]
    for (mesh, array, axes, replica, lanes), batches in _reads(plan).items():
        readers, touched, needed = chunk_reads[mesh].count(array, axes, replica, lanes)
        read[readers] += touched * len(batches)
        all_read, all_needed = int(touched.sum()), int(needed.sum())
        for batch in batches:
            for source in map(plan.source, batch):
                leaf_read[source] += all_read // len(batch)
                leaf_needed[source] += all_needed // len(batch)
    for index in plan.direct:
        leaf = plan.leaves[index]
        if leaf.mesh is None or not leaf.block:  # as far as is known, every process reads all of it
            read += _leaf_bytes(leaf)
            leaf_read[index] = leaf_needed[index] = _leaf_bytes(leaf) * processes
    sizes = [leaf.block_bytes for leaf in plan.leaves]
    for (mesh, axes), groups in by_replicas(plan.groups).items():
        devices = _Copies.on(meshes[mesh], axes)
        total = _Exchanged(groups, sizes, devices.replicas)
        received += devices.by_process(devices.received(total.offered), processes)
    return Volumes(np.rint(read).astype(np.int64), np.rint(received).astype(np.int64), leaf_read, leaf_needed)


_Read = tuple[int, ChunkedArray, tuple[str, ...], int | None, tuple[str, ...]]


def _reads(plan: RestorePlan) -> dict[_Read, list[tuple[int, ...]]]:
    """Returns the different reads of a plan, each with the batches of leaves that are read in this way.

    A read is (mesh, array, replica axes, the replica that reads or None for all, lanes).
    """
    reads: dict[_Read, list[tuple[int, ...]]] = defaultdict(list)
    for index in plan.direct:
        leaf = plan.leaves[index]
        if leaf.mesh is not None and leaf.block:
            reads[leaf.mesh, ChunkedArray.of(leaf), (), None, ()].append((index,))
    for group in plan.groups:
        for one in (one for bundle in group.bundles for one in bundle.reads()):
            array = ChunkedArray.of(plan.leaves[one.leaves[0]], one.splits)
            reads[group.mesh, array, group.axes, one.replica, one.lanes].append(one.leaves)
    return reads


def _leaf_bytes(leaf: Leaf) -> int:
    if leaf.mesh is not None:
        return math.prod(leaf.shape) * leaf.itemsize
    try:
        return math.prod(leaf.shape) * itemsize(leaf.dtype)
    except ValueError:
        return math.prod(leaf.shape) * _ITEMSIZE


class _Exchanged:
    """What the replicas read and offer in some groups, in bytes on each device of a replica."""

    def __init__(self, groups: Iterable[Group], sizes: Sequence[int], replicas: int) -> None:
        self.read = np.zeros(replicas)
        self.read_by_one = np.zeros(replicas)  # the part of `read` in bundles that one replica reads alone
        self.arrays_by_one = np.zeros(replicas)  # that are opened for these bundles
        self.arrays_by_all = 0.0  # that every process opens for the other bundles
        self.offered = np.zeros(replicas)
        self.gathered = np.zeros(replicas)  # the part of `offered` that travels by an all-gather
        self.summed = 0  # bytes that travel by a sum
        for bundle in (bundle for group in groups for bundle in group.bundles):
            read, offered = bundle.read_bytes(sizes, replicas), bundle.offered_bytes(sizes, replicas)
            summed = bundle.summed_bytes(sizes)
            self.read += read
            self.offered += offered
            self.summed += summed
            if not summed:
                self.gathered += offered
            if bundle.reader is None:
                self.arrays_by_all += bundle.arrays_read(replicas)
            else:
                self.read_by_one += read
                self.arrays_by_one[bundle.reader] += bundle.arrays_read(replicas)


@dataclasses.dataclass(frozen=True)
class _Copies:
    """The devices of a mesh, each with its replica along some axes.

    Takes bytes that each replica has on each of its devices, and returns bytes by device.
    """

    replicas: int
    process: np.ndarray  # of each device
    replica: np.ndarray  # of each device
    copies: np.ndarray  # how many devices of the same process hold the same blocks, this one included
    first: np.ndarray  # whether a device is the first of them

    @classmethod
    def on(cls, mesh: MeshInfo, axes: Sequence[str]) -> _Copies:
        table = mesh.owners(axes)
        replica, column = np.divmod(np.arange(table.size), table.shape[1])
        held = table.ravel() * table.shape[1] + column
        _, first, group, copies = np.unique(held, return_index=True, return_inverse=True, return_counts=True)
        is_first = np.zeros(table.size, bool)
        is_first[first] = True
        return cls(len(table), table.ravel(), replica, copies[group], is_first)

    def of_process(self, process: int) -> _Copies:
        here = self.process == process
        return _Copies(self.replicas, self.process[here], self.replica[here], self.copies[here], self.first[here])

    def by_process(self, values: np.ndarray, processes: int) -> np.ndarray:
        return np.bincount(self.process, values, minlength=processes)

    def received(self, offered: np.ndarray) -> np.ndarray:
        """Returns what a device gets from devices of other processes, by whichever route it arrives."""
        return offered.sum() - offered[self.replica] * self.copies

    def sent(self, offered: np.ndarray) -> np.ndarray:
        """Returns what devices of other processes get from a device."""
        return offered[self.replica] * (self.replicas - self.copies)

    def over_links(self, gathered: np.ndarray, summed: int) -> np.ndarray:
        """Returns the bytes that arrive for a device over its process's link, which is what takes time.

        It is more than a device `received` where blocks are summed: a ring passes each block around twice, except the
        part that the device has already, and zeros take as long as data.
        """
        around = 2 * summed * (self.replicas - 1) / self.replicas
        return self.received(gathered) + np.where(self.copies < self.replicas, around, 0)

    def opened(self, arrays: np.ndarray) -> np.ndarray:
        """Returns arrays that a process opens for each of its replicas, counted on one device of each."""
        _, first = np.unique(self.process * self.replicas + self.replica, return_index=True)
        opened = np.zeros(len(self.process))
        opened[first] = arrays[self.replica[first]]
        return opened
