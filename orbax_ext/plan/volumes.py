"""Who reads and receives how much under a plan, process by process. Pure, and quick for thousands of processes.

Bytes read are whole stored chunks, before compression: reading part of a chunk reads all of it, once in each process.
They are exact where the blocks of each process form a grid, as those of neighbours on a mesh do; else an estimate.
Bytes received are what devices get from devices of other processes, as in a restore's report.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from orbax_ext.plan.bundles import LaneBatch, Pack, Sum
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import Group, RestorePlan
from orbax_ext.plan.topology import MeshInfo

_WORD = 4  # bytes; what a pack is counted in


@dataclasses.dataclass(frozen=True)
class Volumes:
    """Bytes by process, and by leaf over all processes."""

    read: np.ndarray  # from storage, by process
    received: np.ndarray  # from other processes, by process
    leaf_read: Mapping[int, int]  # leaf: bytes read by all processes together
    leaf_needed: Mapping[int, int]  # leaf: those of them that were asked for; the rest is what chunks bring along

    @property
    def total_read(self) -> int:
        return int(self.read.sum())

    @property
    def total_received(self) -> int:
        return int(self.received.sum())


def count(plan: RestorePlan, leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], processes: int) -> Volumes:
    """What a plan makes every process read and receive."""
    layouts = [_Layout(mesh, processes) for mesh in meshes]
    tally = _Tally(leaves, plan, processes)
    for index in plan.direct:
        leaf = leaves[index]
        if leaf.mesh is not None and leaf.block:
            tally.read(index, *layouts[leaf.mesh].reads(_box(leaf, leaf.spec), ()))
        else:  # as far as known, every process reads all of it
            size = max(math.prod(leaf.shape) * leaf.itemsize, 0)
            tally.read(index, np.full(processes, size), np.full(processes, size))
    for group in plan.groups:
        _count_group(group, plan, layouts[group.mesh], tally)
    return tally.volumes()


@dataclasses.dataclass(frozen=True)
class _Box:
    """What the devices of a mesh read of an array: how each dimension is cut, by which axes, and its chunks."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    itemsize: int


def _box(leaf: Leaf, cuts: Sequence[Sequence[str]]) -> _Box:
    chunk = leaf.chunk if leaf.chunk and len(leaf.chunk) == len(leaf.shape) else leaf.block
    padded = (*(tuple(axes) for axes in cuts), *((),) * (len(leaf.shape) - len(cuts)))
    return _Box(leaf.shape, tuple(max(1, size) for size in chunk), padded, leaf.itemsize)


def _count_group(group: Group, plan: RestorePlan, layout: _Layout, tally: _Tally) -> None:
    arriving = 0
    summed: Counter[int] = Counter()
    for bundle in group.bundles:
        first = plan.leaves[bundle.leaves[0]] if bundle.leaves else None
        if isinstance(bundle, LaneBatch) and first is not None:
            cuts = [list(axes) for axes in (*first.spec, *((),) * (len(first.shape) - len(first.spec)))]
            for axis, dim in bundle.splits:
                cuts[dim].append(axis)
            read, needed = layout.reads(_box(first, cuts), bundle.lanes)
            tally.read_by_all(bundle.leaves, read, needed)
            arriving += sum(plan.leaves[leaf].block_bytes for leaf in bundle.leaves)
        elif isinstance(bundle, Sum) and first is not None:
            tally.read(bundle.leaf, *layout.reads_of_replica(_box(first, first.spec), group.axes, bundle.reader))
            summed[bundle.reader] += first.block_bytes
        elif isinstance(bundle, Pack):
            for replica, share in enumerate(bundle.shares):
                for index in share:
                    leaf = plan.leaves[index]
                    tally.read(index, *layout.reads_of_replica(_box(leaf, leaf.spec), group.axes, replica))
                    summed[replica] += leaf.block_bytes if bundle.summed else 0
            arriving += 0 if bundle.summed else bundle.words * _WORD * len(bundle.shares)
    tally.receive(layout.gathered(group.axes) * arriving)
    for reader, size in summed.items():
        tally.receive(layout.devices * size, layout.beside_replica(group.axes, reader), size)


class _Tally:
    def __init__(self, leaves: Sequence[Leaf], plan: RestorePlan, processes: int) -> None:
        self._owner = [item.slice.leaf if item.slice else index for index, item in enumerate(plan.leaves)]
        self._read = np.zeros(processes)
        self._received = np.zeros(processes)
        self._leaf_read = dict.fromkeys(range(len(leaves)), 0)
        self._leaf_needed = dict.fromkeys(range(len(leaves)), 0)

    def read(self, item: int, read: np.ndarray | _Few, needed: np.ndarray | _Few) -> None:
        self.read_by_all([item], read, needed)

    def read_by_all(self, items: Sequence[int], read: np.ndarray | _Few, needed: np.ndarray | _Few) -> None:
        """Adds what leaves that are alike make processes read; each leaf has its share of it."""
        if isinstance(read, _Few):
            np.add.at(self._read, read.processes, read.values)
        else:
            self._read += read
        for item in items:
            owner = self._owner[item]
            self._leaf_read[owner] += _total(read) // len(items)
            self._leaf_needed[owner] += _total(needed) // len(items)

    def receive(self, arriving: np.ndarray, there: _Few | None = None, size: int = 0) -> None:
        self._received += arriving
        if there is not None:  # who has it need not receive it
            np.add.at(self._received, there.processes, -there.values * size)

    def volumes(self) -> Volumes:
        return Volumes(
            np.rint(self._read).astype(np.int64),
            np.rint(self._received).astype(np.int64),
            self._leaf_read,
            self._leaf_needed,
        )


@dataclasses.dataclass(frozen=True)
class _Few:
    """Values of some processes; those of all others are 0."""

    processes: np.ndarray
    values: np.ndarray


def _total(values: np.ndarray | _Few) -> int:
    return int(values.values.sum() if isinstance(values, _Few) else values.sum())


class _Layout:
    """The devices of a mesh, and sums over those of each process. What is asked for again is looked up."""

    def __init__(self, mesh: MeshInfo, processes: int) -> None:
        self._processes = processes
        self._owner = np.array(mesh.processes, dtype=np.int64)
        self._sizes = mesh.sizes
        grid = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), -1)
        self._at = dict(zip(mesh.axis_names, grid, strict=True))  # axis: each device's place along it
        self._everyone = np.arange(len(self._owner))
        self.reads = functools.cache(self._reads_of_all)
        self.reads_of_replica = functools.cache(self._reads_of_replica)
        self.gathered = functools.cache(self._gathered)
        self.beside_replica = functools.cache(self._beside_replica)
        self._members = functools.cache(self._members_of)
        self._by_replica = functools.cache(self._table)

    def _reads_of_all(self, box: _Box, lanes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(bytes read, bytes needed) by process, where along `lanes` other leaves that are alike are read."""
        read, needed = self._distinct(box, self._everyone, lanes)
        return self._dense(read), self._dense(needed)

    def _reads_of_replica(self, box: _Box, axes: tuple[str, ...], replica: int) -> tuple[_Few, _Few]:
        return self._distinct(box, self._by_replica(axes)[replica], ())

    def _gathered(self, axes: tuple[str, ...]) -> np.ndarray:
        """By process, for every byte that a device gathers: how many come from elsewhere to its devices."""
        pairs, members = self._members(axes)
        replicas = math.prod(self._sizes[axis] for axis in axes)
        return np.bincount(pairs // self._stride, weights=members * (1 - members / replicas), minlength=self._processes)

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """By process, how many of the mesh's devices it has."""
        return np.bincount(self._owner, minlength=self._processes).astype(float)

    def _beside_replica(self, axes: tuple[str, ...], replica: int) -> _Few:
        """Of the processes with devices of a replica: how many of their devices have copies of what these have."""
        pairs, members = self._members(axes)
        there = np.unique(self._pairs(self._by_replica(axes)[replica], axes))
        processes, where = np.unique(there // self._stride, return_inverse=True)
        return _Few(processes, np.bincount(where, weights=members[np.searchsorted(pairs, there)]))

    def _members_of(self, axes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The (process, clique of copies) that there are, and how many devices are in each."""
        return np.unique(self._pairs(self._everyone, axes), return_counts=True)

    @property
    def _stride(self) -> int:
        return len(self._owner)

    def _pairs(self, devices: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
        """Each device's (process, clique) as one number."""
        clique = np.zeros(len(devices), dtype=np.int64)
        for axis, size in self._sizes.items():
            if axis not in axes:
                clique = clique * size + self._at[axis][devices]
        return self._owner[devices] * self._stride + clique

    def _table(self, axes: tuple[str, ...]) -> list[np.ndarray]:
        """The devices of each replica along `axes`."""
        replica = np.zeros(len(self._owner), dtype=np.int64)
        for axis in axes:
            replica = replica * self._sizes[axis] + self._at[axis]
        order = np.argsort(replica, kind="stable")
        return np.split(order, math.prod(self._sizes[axis] for axis in axes))

    def _dense(self, few: _Few) -> np.ndarray:
        return np.bincount(few.processes, weights=few.values, minlength=self._processes)

    def _distinct(self, box: _Box, devices: np.ndarray, lanes: tuple[str, ...]) -> tuple[_Few, _Few]:
        """(bytes of the chunks that are touched, bytes of the blocks) by process: each counted once in a process."""
        owners = self._owner[devices]
        processes = np.unique(owners)
        read, needed = np.ones(len(processes)), np.ones(len(processes))
        block = np.zeros(len(devices), dtype=np.int64)
        for size, chunk, axes in zip(box.shape, box.chunk, box.cuts, strict=True):
            place, pieces = self._place(devices, axes)
            block = block * pieces + place
            covered, length = _covered(size, chunk, pieces, owners, place, processes)
            read *= covered
            needed *= length
        lane, count = self._place(devices, lanes)
        block = block * count + lane
        of_lane, _ = _covered(count, 1, count, owners, lane, processes)
        read, needed = read * of_lane, needed * of_lane
        # The blocks of a process are a grid, whose sides were multiplied; where they are not, that is too much.
        held = np.unique(owners * (int(block.max(initial=0)) + 1) + block)
        there = np.bincount(
            np.searchsorted(processes, held // (int(block.max(initial=0)) + 1)), minlength=len(processes)
        )
        one = math.prod(
            size // math.prod(self._sizes[a] for a in axes) for size, axes in zip(box.shape, box.cuts, strict=True)
        )
        exact = there * one
        factor = np.divide(exact, needed, out=np.ones(len(processes)), where=needed > 0)
        return _Few(processes, read * factor * box.itemsize), _Few(processes, exact.astype(float) * box.itemsize)

    def _place(self, devices: np.ndarray, axes: Sequence[str]) -> tuple[np.ndarray, int]:
        """Where each device is among the pieces that some axes make, and how many there are."""
        place, pieces = np.zeros(len(devices), dtype=np.int64), 1
        for axis in axes:
            place = place * self._sizes[axis] + self._at[axis][devices]
            pieces *= self._sizes[axis]
        return place, pieces


def _covered(
    size: int, chunk: int, pieces: int, owners: np.ndarray, place: np.ndarray, processes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By process: elements of the chunks that its pieces of one dimension touch, and elements of the pieces."""
    width = size // pieces
    held = np.unique(owners * pieces + place)
    process, piece = np.searchsorted(processes, held // pieces), held % pieces
    first, last = piece * width // chunk, -(-(piece + 1) * width // chunk)
    same = np.concatenate([[False], process[1:] == process[:-1]])
    before = np.where(same, np.concatenate([[0], last[:-1]]), 0)
    begin = np.maximum(first, before)
    touched = np.minimum(last * chunk, size) - np.minimum(begin * chunk, size)
    touched = np.where(last > begin, touched, 0)
    return (
        np.bincount(process, weights=touched, minlength=len(processes)),
        np.bincount(process, weights=np.full(len(held), width), minlength=len(processes)),
    )
