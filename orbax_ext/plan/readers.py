"""Who reads what of a group when a reader is late, has failed, or is slower than the others. Pure.

A group that was read without some of its readers travels as planned, with holes. What the holes lack is dealt to the
other replicas as leaves and slices of a group of its own. If no replica can read all of it, it is dealt column by
column: the devices of a column of the table of replicas hold the same blocks, and one of their processes reads them.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from orbax_ext.plan.bundles import Bundle, ColumnSum, LaneBatch, LeafBatch, Pack, Sum
from orbax_ext.plan.cutting import piece_shape
from orbax_ext.plan.dealing import ShareLoads, dealt_bundles
from orbax_ext.plan.leaves import Leaf, Slice
from orbax_ext.plan.planner import Group
from orbax_ext.plan.topology import MeshInfo

Kind: TypeAlias = tuple[int, tuple[str, ...]]  # a mesh and replica axes

_SAME = 0.6  # rates that differ by less than this factor are taken as equal: shares are moved for more than noise


@dataclasses.dataclass(frozen=True)
class Holes:
    """A group that was read without some readers, and what the others have to read in their place."""

    group: Group  # the same operands; what was not read is dropped, or filled later
    leaves: tuple[Leaf, ...]  # the plan's leaves, and new slices
    missing: tuple[int, ...]  # leaves and slices that nobody has read


def replicas_with(group: Group, meshes: Sequence[MeshInfo], processes: Collection[int]) -> frozenset[int]:
    """Returns the replicas of which one of these processes has devices."""
    rows = meshes[group.mesh].owners(group.axes)
    return frozenset(row for row, owners in enumerate(rows) if set(owners.tolist()) & set(processes))


def replica_rates(group: Group, meshes: Sequence[MeshInfo], rates: Mapping[int, float]) -> tuple[float, ...]:
    """Returns how fast each replica reads, from the rates of the processes: as fast as its slowest process.

    A process that has devices of several replicas divides its rate among them.
    """
    rows = [set(owners.tolist()) for owners in meshes[group.mesh].owners(group.axes)]
    divided = _divided(rows, rates)
    return tuple(min(divided[process] for process in row) for row in rows)


def column_rates(group: Group, meshes: Sequence[MeshInfo], rates: Mapping[int, float]) -> tuple[tuple[float, ...], ...]:
    """Returns for each column of the table of replicas how fast each replica reads the blocks there."""
    table = meshes[group.mesh].owners(group.axes).tolist()
    divided = _divided([set(row) for row in table], rates)
    return tuple(tuple(divided[process] for process in column) for column in zip(*table, strict=True))


def _divided(rows: Sequence[Collection[int]], rates: Mapping[int, float]) -> dict[int, float]:
    shared = {process: sum(process in row for row in rows) for process in rates}
    return {process: rate / shared[process] for process, rate in rates.items() if shared[process]}


def without(group: Group, absent: Collection[int], leaves: Sequence[Leaf], sizes: Mapping[str, int]) -> Holes:
    """Returns a group as it travels if some replicas have not read it, and what they have not read.

    `sizes` are those of the group's replica axes. The group keeps its operands, so its program stays the same.
    """
    work = _Work(list(leaves), sizes, absent)
    bundles = tuple(work.without(bundle) for bundle in group.bundles)
    holed = dataclasses.replace(
        group, bundles=bundles, dropped=group.dropped | work.dropped, later=(*group.later, *work.later)
    )
    missing = tuple(index for index in work.missing if index not in group.dropped)
    return Holes(holed, tuple(work.leaves), missing)


def dealt(
    group: Group, missing: Sequence[int], leaves: Sequence[Leaf], rates: Sequence[float], one_reader: bool
) -> Group:
    """Returns a group of leaves and slices that are dealt to replicas by the rates at which they read.

    A replica with the rate 0 reads nothing. With `one_reader` the fastest replica reads everything.
    """
    loads = ShareLoads.only(rates.index(max(rates)), len(rates)) if one_reader else ShareLoads(rates)
    size = sum(leaves[index].block_bytes for index in missing)
    return Group(group.mesh, group.axes, dealt_bundles(missing, leaves, loads), size)


def dealt_by_column(
    group: Group,
    missing: Sequence[int],
    leaves: Sequence[Leaf],
    rates: Sequence[tuple[float, ...]],
    one_reader: bool,
) -> Group:
    """Returns a group of leaves and slices that are dealt by the rates at which replicas read each column.

    Each column has a replica with a rate other than 0. With `one_reader` the fastest one there reads everything.
    """
    sizes = {index: leaves[index].block_bytes for index in missing}
    order = sorted(missing, key=lambda index: (-sizes[index], index))
    dealt: dict[tuple[float, ...], list[int]] = {}
    for column in dict.fromkeys(rates):
        loads = ShareLoads.only(column.index(max(column)), len(column)) if one_reader else ShareLoads(column)
        dealt[column] = [loads.deal(sizes[index]) for index in order]
    by_leaf = zip(*(dealt[column] for column in rates), strict=True)
    bundles = tuple(ColumnSum(index, replicas) for index, replicas in zip(order, by_leaf, strict=True))
    return Group(group.mesh, group.axes, bundles, sum(sizes.values()))


def redealt(
    groups: Sequence[Group],
    leaves: Sequence[Leaf],
    meshes: Sequence[MeshInfo],
    rates: Mapping[int, float],
    one_reader: bool,
    carried: Mapping[Kind, Sequence[int]] = types.MappingProxyType({}),
) -> tuple[tuple[Group, ...], tuple[Leaf, ...]]:
    """Returns groups that nobody has begun to read with shares by the rates of the processes, and the plan's leaves.

    The groups are those of the plan, in which all replicas read as much, or the same one reads everything. With
    `one_reader` groups get another reader if theirs is slow. A hole is filled by its group or by a later one: by the
    first with which there are holes for all readers. `carried` are slices that fill holes of earlier groups.
    """
    work, made = list(leaves), []
    last = {(group.mesh, group.axes): place for place, group in enumerate(groups)}
    holes = {kind: [*carried.get(kind, ())] for kind in last}
    loads: dict[Kind, ShareLoads] = {}
    for place, group in enumerate(groups):
        kind = group.mesh, group.axes
        by_replica, by_column = replica_rates(group, meshes, rates), column_rates(group, meshes, rates)
        if not any(by_replica) and all(map(any, by_column)):  # no replica reads all of it
            dealt_again = dealt_by_column(group, group.leaves, work, by_column, one_reader)
            made.append(dataclasses.replace(group, bundles=dealt_again.bundles))
        elif one_reader:
            made.append(_with_reader(group, work, by_replica) if any(by_replica) else group)
        elif not any(by_replica) or not differ(by_replica):  # nobody reads it any faster
            made.append(group)
        else:
            sizes = {axis: meshes[group.mesh].sizes[axis] for axis in group.axes}
            made.append(_redealt(group, work, sizes, loads.setdefault(kind, ShareLoads(by_replica)), holes[kind]))
        if waiting := holes[kind]:
            readers = loads.setdefault(kind, ShareLoads([max(rate, 1e-9) for rate in by_replica]))
            if len(waiting) >= readers.able(max(work[index].block_bytes for index in waiting)) or place == last[kind]:
                filled = (*made[-1].bundles, *dealt_bundles(waiting, work, readers))
                made[-1] = dataclasses.replace(made[-1], bundles=filled)
                waiting.clear()
    return tuple(made), tuple(work)


def differ(rates: Collection[float]) -> bool:
    """Returns whether rates differ by more than noise."""
    return min(rates) < _SAME * max(rates)


def _with_reader(group: Group, leaves: Sequence[Leaf], rates: Sequence[float]) -> Group:
    best = rates.index(max(rates))
    reader = next((bundle.reader for bundle in group.bundles), None)
    if reader is None or rates[reader] >= _SAME * rates[best]:
        return group
    return read_by(best, group, leaves, len(rates))


def read_by(replica: int, group: Group, leaves: Sequence[Leaf], replicas: int) -> Group:
    """Returns a group that one replica reads."""
    return dataclasses.replace(group, bundles=dealt_bundles(group.leaves, leaves, ShareLoads.only(replica, replicas)))


def _redealt(group: Group, leaves: list[Leaf], sizes: Mapping[str, int], loads: ShareLoads, holes: list[int]) -> Group:
    """Returns a group with shares by rates. Adds slices that nobody reads yet to `holes`."""
    bytes_of = {index: leaves[index].block_bytes for index in group.leaves}
    loads.grow(sum(bytes_of.values()))
    kept: list[Bundle] = []
    missing: list[int] = []
    later: list[tuple[int, tuple[int, ...]]] = []
    for bundle in group.bundles:
        if isinstance(bundle, LaneBatch):
            piece = sum(bytes_of[leaf] for leaf in bundle.leaves) // len(loads.rates)
            absent = loads.overloaded(piece)
            if not absent:
                kept.append(bundle)
                continue
            work = _Work(leaves, sizes, absent)
            holed = work.without(bundle)
            if set(holed.leaves) & work.dropped:
                missing += bundle.leaves  # whole: what it lacks can't be written as slices
                loads.give_back(piece, absent)
                work.undo()
            else:
                kept.append(holed)
                holes += work.missing
                later += work.later
        else:
            missing += bundle.leaves
    added = dealt_bundles(missing, leaves, loads)
    return dataclasses.replace(group, bundles=(*kept, *added), later=tuple(later))


class _Work:
    """Takes absent replicas out of bundles, and notes what they would have read. Adds new slices to the leaves."""

    def __init__(self, leaves: list[Leaf], sizes: Mapping[str, int], absent: Collection[int]) -> None:
        self.leaves = leaves
        self._count = len(leaves)
        self.missing: list[int] = []
        self.dropped: frozenset[int] = frozenset()
        self.later: list[tuple[int, tuple[int, ...]]] = []
        self._sizes = sizes
        self._absent = frozenset(absent)

    def undo(self) -> None:
        """Takes the slices back that were added."""
        del self.leaves[self._count :]

    def without(self, bundle: Bundle) -> Bundle:
        if isinstance(bundle, Sum):
            if bundle.reader in self._absent:
                self._drop([bundle.leaf])
            return bundle
        if isinstance(bundle, ColumnSum):
            if self._absent.intersection(bundle.readers):
                self._drop([bundle.leaf])
            return bundle
        if isinstance(bundle, Pack):
            self._drop(
                [leaf for replica, share in enumerate(bundle.shares) if replica in self._absent for leaf in share]
            )
            return bundle
        if isinstance(bundle, LeafBatch):
            shares = (bundle.shares[replica] for replica in sorted(self._absent))
            self._drop([leaf for leaf in shares if leaf is not None])
            return bundle
        return self._without_lanes(bundle)

    def _drop(self, leaves: Sequence[int]) -> None:
        self.missing += leaves
        self.dropped |= frozenset(leaves)

    def _without_lanes(self, bundle: LaneBatch) -> LaneBatch:
        new = self._absent - set(bundle.absent)
        for lane, leaf in enumerate(bundle.leaves):
            absent = [replica for replica in sorted(new) if lane_of(bundle, self._sizes, replica) == lane]
            pieces = [self._piece(bundle, leaf, replica) for replica in absent]
            slices = [piece for piece in pieces if piece is not None]
            if len(slices) < len(pieces):
                self._drop([leaf])
            elif slices:
                first = len(self.leaves)
                for rows in slices:
                    self.leaves += _cut(self.leaves[leaf], rows, self._sizes)
                added = tuple(range(first, len(self.leaves)))
                self.missing += added
                self.later.append((leaf, added))
        return dataclasses.replace(bundle, absent=tuple(sorted(self._absent | set(bundle.absent))))

    def _piece(self, bundle: LaneBatch, index: int, replica: int) -> Slice | None:
        """Returns the rows of a leaf that a replica reads; None if they can't be written as a slice of it."""
        leaf = self.leaves[index]
        dims = {dim for _, dim in bundle.splits}
        if len(dims) != 1 or not leaf.divisible:
            return None
        (dim,) = dims
        if leaf.slice is not None and leaf.slice.dim != dim:
            return None
        size = piece_shape(leaf.block, dict(bundle.splits), self._sizes)[dim]
        split = [axis for axis, _ in bundle.splits]
        start = _place(split, self._sizes, replica) * size
        if leaf.slice is None:
            return Slice(index, dim, start, size)
        return Slice(leaf.slice.leaf, dim, leaf.slice.start + start, size)


def lane_of(bundle: LaneBatch, sizes: Mapping[str, int], replica: int) -> int:
    """Returns the lane in which a replica reads."""
    return _place(bundle.lanes, sizes, replica)


def _place(axes: Sequence[str], sizes: Mapping[str, int], replica: int) -> int:
    """Returns the place of a replica along some of the replica axes, in the mesh's order."""
    place, stride = 0, math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        if axis in axes:
            place = place * size + replica // stride % size
    return place


def _cut(leaf: Leaf, rows: Slice, sizes: Mapping[str, int]) -> list[Leaf]:
    """Returns a slice in as many equal parts as chunks allow, for as many readers as there are."""
    parts, chunk = 1, leaf.chunk[rows.dim] if leaf.chunk else 0
    if chunk and rows.size % chunk == 0 and rows.start % chunk == 0:
        counts = range(min(rows.size // chunk, math.prod(sizes.values())), 0, -1)
        parts = next(count for count in counts if rows.size // chunk % count == 0)
    size = rows.size // parts
    return [leaf.sliced(dataclasses.replace(rows, start=rows.start + part * size, size=size)) for part in range(parts)]
