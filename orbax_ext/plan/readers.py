"""Who reads what of a group when a reader is late, has failed, or is slower than the others. Pure.

A group that was read without some of its readers travels as planned, with holes. What the holes lack is dealt to the
other replicas as leaves and slices of a group of its own. If no replica can read all of it, it is dealt column by
column: the devices of a column of the table of replicas hold the same blocks, and one of their processes reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from orbax_ext.plan.bundles import Bundle, ColumnSum, LaneBatch, Pack, Sum, make_pack
from orbax_ext.plan.cutting import piece_shape
from orbax_ext.plan.leaves import Leaf, Slice
from orbax_ext.plan.planner import Group
from orbax_ext.plan.topology import MeshInfo

_SMALL = 128 << 10  # bytes of a block below which a leaf is packed: an operand of its own costs more
_SAME = 0.6  # rates that differ by less than this factor are taken as equal: shares are moved for more than noise
_AHEAD = 2.0  # times that a group takes: no reader is dealt a piece that takes it longer


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
    loads = _Loads.only(rates.index(max(rates)), len(rates)) if one_reader else _Loads(rates)
    sizes = {index: leaves[index].block_bytes for index in missing}
    bundles = _dealt(missing, sizes, loads)
    return Group(group.mesh, group.axes, bundles, sum(sizes.values()))


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
        loads = _Loads.only(column.index(max(column)), len(column)) if one_reader else _Loads(column)
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
) -> tuple[tuple[Group, ...], tuple[Leaf, ...]]:
    """Returns groups that nobody has begun to read with shares by the rates of the processes, and the plan's leaves.

    The groups are those of the plan, in which all replicas read as much, or the same one reads everything. With
    `one_reader` groups get another reader if theirs is slow.
    """
    work, made = list(leaves), []
    loads: dict[tuple[int, tuple[str, ...]], _Loads] = {}
    for group in groups:
        kind = group.mesh, group.axes
        by_replica, by_column = replica_rates(group, meshes, rates), column_rates(group, meshes, rates)
        if not any(by_replica) and all(map(any, by_column)):  # no replica reads all of it
            dealt_again = dealt_by_column(group, group.leaves, work, by_column, one_reader)
            made.append(dataclasses.replace(group, bundles=dealt_again.bundles))
        elif not any(by_replica) or not differ(by_replica):  # nobody reads it any faster
            made.append(group)
        elif one_reader:
            made.append(_with_reader(group, work, by_replica))
        else:
            sizes = {axis: meshes[group.mesh].sizes[axis] for axis in group.axes}
            made.append(_redealt(group, work, sizes, loads.setdefault(kind, _Loads(by_replica))))
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
    sizes = {index: leaves[index].block_bytes for index in group.leaves}
    return dataclasses.replace(group, bundles=_dealt(group.leaves, sizes, _Loads.only(replica, replicas)))


def _redealt(group: Group, leaves: list[Leaf], sizes: Mapping[str, int], loads: _Loads) -> Group:
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
                missing += work.missing
                later += work.later
        else:
            missing += bundle.leaves
    added = _dealt(missing, {index: leaves[index].block_bytes for index in missing}, loads)
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


class _Loads:
    """How long each replica will have read, in the order in which leaves are dealt."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = tuple(rates)
        self._seconds = [0.0] * len(self.rates)
        self._target = 0.0
        self._longest = math.inf

    @classmethod
    def only(cls, reader: int, replicas: int) -> _Loads:
        """Returns the loads where one replica reads everything."""
        return cls([float(replica == reader) for replica in range(replicas)])

    def grow(self, size: int) -> None:
        """Takes note that so many bytes are dealt next."""
        self._target += size / sum(self.rates)
        self._longest = _AHEAD * size / sum(self.rates)

    def overloaded(self, piece: int) -> frozenset[int]:
        """Deals one piece to each replica; returns those for which that is too much."""
        slack = len(self.rates) * piece / sum(self.rates) / 2
        over = set()
        for replica, rate in enumerate(self.rates):
            seconds = piece / rate if rate else math.inf
            if seconds > self._longest or self._seconds[replica] + seconds > self._target + slack:
                over.add(replica)
            else:
                self._seconds[replica] += seconds
        return frozenset(over)

    def give_back(self, piece: int, absent: Collection[int]) -> None:
        """Undoes `overloaded`, which returned `absent`."""
        for replica, rate in enumerate(self.rates):
            if replica not in absent:
                self._seconds[replica] -= piece / rate

    def deal(self, size: int) -> int:
        """Returns the replica that would have read so many bytes more first."""

        def ends(replica: int) -> tuple[bool, float, int]:
            seconds = size / self.rates[replica]
            return seconds > self._longest, self._seconds[replica] + seconds, replica

        reader = min((replica for replica, rate in enumerate(self.rates) if rate), key=ends)
        self._seconds[reader] += size / self.rates[reader]
        return reader


def _dealt(missing: Sequence[int], sizes: Mapping[int, int], loads: _Loads) -> tuple[Bundle, ...]:
    bundles: list[Bundle] = []
    shares: list[list[int]] = [[] for _ in loads.rates]
    for index in sorted(missing, key=lambda index: (-sizes[index], index)):
        reader = loads.deal(sizes[index])
        if sizes[index] >= _SMALL:
            bundles.append(Sum(index, reader))
        else:
            shares[reader].append(index)
    if any(shares):
        bundles.append(make_pack(tuple(map(tuple, shares)), sizes))
    return tuple(bundles)
