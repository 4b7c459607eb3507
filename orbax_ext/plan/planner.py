"""Makes a `RestorePlan` from leaves, meshes and options."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from orbax_ext.options import Options
from orbax_ext.plan.bundles import Bundle, LaneBatch, Sum, make_pack
from orbax_ext.plan.cutting import lane_count, piece_shape, slices, split
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo, check_axes, find_axes, infer_axes

_SMALL = 128 << 10  # bytes of one replica's piece below which a leaf is packed: an operand of its own costs more
_LARGE = 4 << 20  # bytes of a block above which a leaf is not packed, however many replicas there are to cut it


@dataclasses.dataclass(frozen=True)
class Group:
    """Bundles that travel together, in one program."""

    mesh: int
    axes: tuple[str, ...]  # the replica axes, in the mesh's order
    bundles: tuple[Bundle, ...]
    device_bytes: int  # of the leaves on one device
    dropped: frozenset[int] = frozenset()  # leaves that travel but were not read: they come again in another group
    later: tuple[tuple[int, tuple[int, ...]], ...] = ()  # leaves with holes, and the slices that fill them

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(leaf for bundle in self.bundles for leaf in bundle.leaves)


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """Who reads what and how it travels."""

    strategy: str  # of the leaves that travel: "spread" or "single"
    leaves: tuple[Leaf, ...]  # the leaves asked for, then slices of some of them; bundles have indices of both
    groups: tuple[Group, ...]
    direct: Mapping[int, str]  # index of a leaf: why it is read directly
    because: str = ""  # why the others travel, where that was a choice

    def source(self, index: int) -> int:
        """Returns the index of the leaf asked for: the same, or for a slice that of the leaf it is cut from."""
        rows = self.leaves[index].slice
        return index if rows is None else rows.leaf

    def sources(self, groups: Iterable[Group]) -> list[int]:
        """Returns the leaves asked for that groups hold, whole or in slices."""
        return list(dict.fromkeys(self.source(index) for group in groups for index in group.leaves))

    def divided(self, numbers: Collection[int]) -> RestorePlan:
        """Returns the plan as it is carried out if these groups are read directly. The others keep their numbers."""
        reason = "it was read while exchanges were waited for"
        back = {index: reason for number in numbers for index in self.groups[number].leaves}
        groups = [
            dataclasses.replace(group, bundles=(), device_bytes=0) if number in numbers else group
            for number, group in enumerate(self.groups)
        ]
        while groups and not groups[-1].bundles:
            groups.pop()
        return dataclasses.replace(self, groups=tuple(groups), direct={**self.direct, **back})


def make_plan(
    leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], options: Options, *, processes: int, group_bytes: int
) -> RestorePlan:
    """Decides for every leaf how it travels, and makes groups of at most `group_bytes` bytes per device.

    Leaves above the group size are cut into slices. A bundle that cannot be cut further makes a group of its own.
    """
    direct, travelling = who_travels(leaves, meshes, options, processes=processes)
    groups: list[Group] = []
    with_slices = list(leaves)
    single = options.strategy == "single"
    for (mesh, axes), indices in travelling.items():
        sizes = {axis: meshes[mesh].sizes[axis] for axis in axes}
        chosen: dict[int, Leaf] = {}
        for index in indices:
            cut = slices(leaves[index], index, {} if single else sizes, group_bytes)
            chosen |= dict(enumerate(cut, len(with_slices))) if cut else {index: leaves[index]}
            with_slices += cut
        if single:
            made = _single(chosen, math.prod(sizes.values()), options.primary_replica_id or 0, group_bytes)
        else:
            made = _spread(chosen, sizes, group_bytes)
        groups += in_groups(Group(mesh, axes, tuple(made), 0), with_slices, group_bytes)
    return RestorePlan("single" if single else "spread", tuple(with_slices), tuple(groups), direct)


def who_travels(
    leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], options: Options, *, processes: int
) -> tuple[dict[int, str], dict[tuple[int, tuple[str, ...]], list[int]]]:
    """Returns why some leaves are read directly, and the indices of the others by (mesh, replica axes)."""
    if options.axes is not None:
        check_axes(meshes, options.axes)
    placements = [_Placement(index, mesh, leaves, options, processes) for index, mesh in enumerate(meshes)]
    direct: dict[int, str] = {}
    travelling: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if leaf.direct_because or leaf.mesh is None:
            direct[index] = leaf.direct_because or "it has no mesh"
            continue
        axes, reason = placements[leaf.mesh].of(leaf.used_axes)
        if reason:
            direct[index] = reason
        else:
            travelling[leaf.mesh, axes].append(index)
    return direct, travelling


def by_replicas(groups: Iterable[Group]) -> dict[tuple[int, tuple[str, ...]], list[Group]]:
    """Returns the groups by (mesh, replica axes)."""
    by_kind: dict[tuple[int, tuple[str, ...]], list[Group]] = defaultdict(list)
    for group in groups:
        by_kind[group.mesh, group.axes].append(group)
    return by_kind


def largest_lane_batch(leaves: Sequence[Leaf], meshes: Sequence[MeshInfo]) -> int:
    """Returns the bytes per device of the largest batch of lanes: leaves whose chunks let them travel only together."""
    travelling = (leaf for leaf in leaves if leaf.mesh is not None and not leaf.direct_because)
    # Thousands of leaves have the same blocks.
    kinds = {(leaf.mesh, leaf.spec, leaf.block, leaf.chunk, leaf.itemsize): leaf for leaf in travelling}
    most = 0
    for leaf in kinds.values():
        assert leaf.mesh is not None
        axes = {axis: meshes[leaf.mesh].sizes[axis] for axis in infer_axes(meshes[leaf.mesh], leaf.used_axes)}
        lanes = lane_count(leaf, axes)
        most = max(most, leaf.block_bytes * lanes if lanes > 1 else 0)
    return most


def digest(value: object) -> str:
    """Returns a short fingerprint of plain data, the same on every process for equal data."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


class _Placement:
    """What a mesh means for the leaves on it, worked out once: there may be many leaves and devices."""

    def __init__(self, index: int, mesh: MeshInfo, leaves: Sequence[Leaf], options: Options, processes: int) -> None:
        self._mesh = mesh
        self._strategy = options.strategy
        self._single_axes = _single_axes(index, mesh, leaves, options)
        self._never = _no_primary(mesh, self._single_axes, options)
        self.of = functools.cache(self._of)  # thousands of leaves use the same axes
        if options.strategy == "direct":
            self._never = "strategy is 'direct'"
        elif options.strategy == "auto" and processes == 1:
            self._never = "there is only one process"
        elif set(mesh.processes) != set(range(processes)):
            self._never = f"its mesh {mesh} does not span all processes"

    def _of(self, used: frozenset[str]) -> tuple[tuple[str, ...], str]:
        """Returns the axes along which a leaf that uses some is replicated, and why it is read directly, if it is."""
        axes = self._single_axes if self._strategy == "single" else infer_axes(self._mesh, used)
        return axes, self._why_direct(used, axes)

    def _why_direct(self, used: frozenset[str], axes: tuple[str, ...]) -> str:
        if self._never:
            return self._never
        if self._mesh.replicas(axes) == 1:
            return f"there is only one replica of it in the mesh {self._mesh}"
        if self._strategy == "auto" and not self._mesh.crosses_processes(axes):
            return "all its copies are on one process"
        if used & set(axes):
            return f"it is sharded on the replica axis {', '.join(map(repr, axes))}"
        return ""


def _single_axes(index: int, mesh: MeshInfo, leaves: Sequence[Leaf], options: Options) -> tuple[str, ...]:
    """Returns the replica axes of a mesh where one replica reads: the user's if it has these, or those no leaf uses."""
    if options.axes is not None and (axes := find_axes(mesh, options.axes)) is not None:
        return axes
    used: set[str] = set().union(*(leaf.used_axes for leaf in leaves if leaf.mesh == index))
    return infer_axes(mesh, used)


def _no_primary(mesh: MeshInfo, axes: tuple[str, ...], options: Options) -> str:
    """Returns why no replica of a mesh is the primary one, or an empty string.

    Raises `ValueError` where that is a mistake: `primary_replica_id` counts along the user's axis, which a mesh of
    something else may lack.
    """
    primary, replicas = options.primary_replica_id or 0, mesh.replicas(axes)
    if replicas == 1 or primary < replicas:
        return ""
    if options.axes is not None and find_axes(mesh, options.axes) is None:
        return f"its mesh {mesh} has no replica {primary}" if options.strategy == "single" else ""
    raise ValueError(
        f"primary_replica_id={primary} does not exist: the mesh {mesh} has {replicas} replicas along "
        f"{', '.join(map(repr, axes))}. Give a number from 0 to {replicas - 1}."
    )


def _single(leaves: Mapping[int, Leaf], replicas: int, reader: int, group_bytes: int) -> list[Bundle]:
    """Makes bundles that one replica reads alone."""
    sizes = {index: leaf.block_bytes for index, leaf in leaves.items()}
    small = [index for index, size in sizes.items() if size < _SMALL]
    made: list[Bundle] = [Sum(index, reader) for index, size in sizes.items() if size >= _SMALL]
    for batch in _batches(small, sizes, max(1, group_bytes // 2)):
        made.append(make_pack(tuple(tuple(batch) if n == reader else () for n in range(replicas)), sizes))
    return made


def _spread(leaves: Mapping[int, Leaf], axes: Mapping[str, int], group_bytes: int) -> list[Bundle]:
    """Makes bundles of which every replica reads a disjoint share, as equal in bytes as chunks allow."""
    sizes = {index: leaf.block_bytes for index, leaf in leaves.items()}
    small: list[int] = []
    equals: dict[tuple[tuple[int, ...], str, tuple[tuple[str, int], ...]], list[int]] = defaultdict(list)
    for index, leaf in leaves.items():
        assigned = split(leaf.block, leaf.chunk, axes)
        piece = piece_shape(leaf.block, assigned, axes)
        if not leaf.block or (math.prod(piece) * leaf.itemsize < _SMALL and sizes[index] <= _LARGE):
            small.append(index)
            continue
        splits = tuple((axis, assigned[axis]) for axis in axes if axis in assigned)
        equals[leaf.block, leaf.dtype, splits].append(index)
    made: list[Bundle] = []
    alone: list[int] = []  # large leaves that are too few for a batch
    for (_, _, splits), indices in equals.items():
        lanes = tuple(axis for axis in axes if axis not in dict(splits))
        count = math.prod(axes[lane] for lane in lanes)
        size = sizes[indices[0]]
        # One leaf at a time is slower, but a whole batch of these would exceed the group size.
        whole = 0 if lanes and count * size > group_bytes else len(indices) - len(indices) % count
        made += [LaneBatch(tuple(indices[start : start + count]), splits, lanes) for start in range(0, whole, count)]
        (alone if size > _LARGE else small).extend(indices[whole:])
    # A heap of (bytes dealt out whole so far, replica); of what is cut, all replicas read the same.
    loads = [(0, replica) for replica in range(math.prod(axes.values()))]
    made += [Sum(index, reader) for index, reader in _deal(alone, sizes, loads)]
    for batch in _even_batches(
        sorted(small, key=lambda index: (-sizes[index], index)), sizes, max(1, group_bytes // 2)
    ):
        shares: list[list[int]] = [[] for _ in loads]
        for index, reader in _deal_in_runs(batch, sizes, loads):
            shares[reader].append(index)
        made.append(make_pack(tuple(map(tuple, shares)), sizes))
    return made


def _deal(indices: Sequence[int], sizes: Mapping[int, int], loads: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields (leaf, replica): the largest leaves first, each for the replica that has the least so far."""
    for index in sorted(indices, key=lambda index: (-sizes[index], index)):
        load, replica = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], replica))
        yield index, replica


def _deal_in_runs(
    indices: Sequence[int], sizes: Mapping[int, int], loads: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Does the same, but gives each replica equal leaves that follow each other: they are stored side by side."""
    for _, equal in itertools.groupby(sorted(indices, key=lambda index: (-sizes[index], index)), sizes.__getitem__):
        run = list(equal)
        yield from zip(run, sorted(reader for _, reader in _deal(run, sizes, loads)), strict=True)


def in_groups(group: Group, leaves: Sequence[Leaf], group_bytes: int) -> list[Group]:
    """Returns groups of at most `group_bytes` bytes per device that hold the bundles of one group."""
    made = group.bundles
    # Equal bundles were made one after the other. In this order, most groups share a program.
    sizes = {place: sum(leaves[leaf].block_bytes for leaf in bundle.leaves) for place, bundle in enumerate(made)}
    return [
        Group(group.mesh, group.axes, tuple(made[place] for place in batch), sum(sizes[place] for place in batch))
        for batch in _batches(range(len(made)), sizes, group_bytes)
    ]


def _even_batches(indices: Sequence[int], sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Does what `_batches` does, in batches of the same size as far as possible: then they share a program."""
    total, largest = sum(sizes[index] for index in indices), max((sizes[index] for index in indices), default=0)
    if not total:
        return _batches(indices, sizes, most)
    count = -(-total // most)
    return _batches(indices, sizes, min(most, -(-total // (count * largest)) * largest))


def _batches(indices: Iterable[int], sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Splits indices, in their order, into batches of at most `most` bytes; what is larger makes a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for index in indices:
        if not batches or sizes[index] > room:
            batches.append([])
            room = most
        batches[-1].append(index)
        room -= sizes[index]
    return batches
