"""Leaves that some processes have in a local checkpoint and others lack: who loads which block, and who sends it. Pure.

A block is known by its column in a table of devices: all devices of a column need the same block. The table has one
device of each process in a column; the process's other devices copy from that one.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from orbax_ext.plan.bundles import Pack
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo, infer_axes

_SMALL = 128 << 10  # bytes of a block below which leaves travel as one vector: an operand of its own costs more
_ALIGN, _WORD = 8, 4  # bytes, as in a `Pack`

_MOST_OTHERS = 64  # blocks for other processes that a process offers: more would make messages long

ABSENT = -1  # in `loaded`: a device that has loaded no block

Loaded = tuple[int, ...]  # for each device of a table, row by row: the column of the block that it has loaded
Chunk = tuple[int, ...]
Schedule = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]  # moves from device to device, and senders of a sum


@dataclasses.dataclass(frozen=True)
class StoredChunks:
    """The chunks of one array that a directory holds."""

    shape: tuple[int, ...]  # of the array
    chunk: Chunk  # shape of a chunk
    present: frozenset[tuple[int, ...]]  # places of chunks in the grid that they make


class Columns:
    """The devices that need the same blocks of the leaves with one spec, as a table with a column for each block."""

    def __init__(self, mesh: MeshInfo, spec: tuple[tuple[str, ...], ...]) -> None:
        self.axes = infer_axes(mesh, {axis for axes in spec for axis in axes})
        self.table = leaders(mesh, self.axes)
        self.owners = np.array(mesh.processes)[self.table].ravel()
        self._of_process: dict[int, list[int]] = defaultdict(list)
        for place, process in enumerate(self.owners.tolist()):
            self._of_process[process].append(place)
        position = dict(zip(mesh.axis_names, np.unravel_index(self.table[0], mesh.axis_sizes), strict=True))
        places = [_mixed([(position[axis], mesh.sizes[axis]) for axis in axes], self.count) for axes in spec]
        self.blocks = tuple(zip(*(place.tolist() for place in places), strict=True)) or ((),) * self.count
        self.column_of = {block: column for column, block in enumerate(self.blocks)}

    @property
    def count(self) -> int:
        """How many different blocks there are."""
        return int(self.table.shape[1])

    @functools.cached_property
    def complete(self) -> Loaded:
        """What the devices have loaded if each has the block that it needs."""
        return tuple(range(self.count)) * len(self.table)

    def of_process(self, process: int) -> list[int]:
        """Returns the positions in the table, row by row, of a process's devices."""
        return self._of_process[process]

    def offers(self, process: int, leaf: Leaf, stored: StoredChunks) -> tuple[int, ...]:
        """Returns what a process can load of what it has stored, as columns.

        First for each of its devices the block that the device needs, or ABSENT. Then blocks for other processes'
        devices: after a restart, a process may have another place in the mesh.
        """
        needed = [position % self.count for position in self.of_process(process)]
        held = self._held(set(needed), leaf, stored)
        first = min(needed, default=0)  # so that processes with very many blocks do not all offer the same ones
        others = sorted(held - set(needed), key=lambda column: ((column - first) % self.count, column))
        return (*(column if column in held else ABSENT for column in needed), *others[:_MOST_OTHERS])

    def _held(self, needed: Collection[int], leaf: Leaf, stored: StoredChunks) -> set[int]:
        if stored.shape != leaf.shape:
            return set()
        if stored.chunk == leaf.block:  # otherwise blocks for other devices, made of several chunks, are not looked for
            return {self.column_of[chunk] for chunk in stored.present if chunk in self.column_of}
        return {column for column in needed if covered(self.blocks[column], leaf.block, stored)}


def leaders(mesh: MeshInfo, axes: Sequence[str]) -> np.ndarray:
    """Returns a table of devices: a column for each block, and in it one device of each process that needs the block.

    Columns of different lengths make no table; then all devices are in it.
    """
    devices = mesh.devices(axes)
    owners = np.array(mesh.processes)[devices]
    columns = [devices[np.sort(np.unique(column, return_index=True)[1]), at] for at, column in enumerate(owners.T)]
    return np.stack(columns, axis=1) if len(set(map(len, columns))) == 1 else devices


def covered(block: tuple[int, ...], size: tuple[int, ...], stored: StoredChunks) -> bool:
    """Returns whether all chunks that a block of a leaf touches are there; `block` is its place in the grid."""
    ranges = [
        range(place * width // chunk, -(-(place + 1) * width // chunk))
        for place, width, chunk in zip(block, size, stored.chunk, strict=True)
    ]
    return all(chunk in stored.present for chunk in itertools.product(*ranges))


class LeastBusy:
    """Places of devices, of which it returns the one whose process has the fewest bytes to do, the first of several.

    What a process has to do only grows, so that a place that is not first in the heap can't have become first.
    """

    def __init__(self, places: Iterable[int], owners: Sequence[int], busy: Mapping[int, int]) -> None:
        self._owners = owners
        self._busy = busy
        self._heap = [(busy[owners[place]], place) for place in places]
        heapq.heapify(self._heap)

    def first(self) -> int:
        """Returns the place whose process is the least busy now."""
        while True:
            known, place = self._heap[0]
            if (now := self._busy[self._owners[place]]) == known:
                return place
            heapq.heapreplace(self._heap, (now, place))

    def take(self) -> int:
        """Returns the first, and takes it out."""
        place = self.first()
        heapq.heappop(self._heap)
        return place


@dataclasses.dataclass(frozen=True)
class Relay:
    """Leaves that travel as one operand."""

    leaves: tuple[int, ...]
    words: int  # of the vector that holds small leaves; 0: one leaf that travels as it is

    @property
    def pack(self) -> Pack:
        """How small leaves lie in their vector."""
        return Pack((self.leaves,), self.words, summed=True)


@dataclasses.dataclass(frozen=True)
class RelayGroup:
    """Relays that travel together, in one program. Positions are those in the leaves' table of devices, row by row."""

    mesh: int
    axes: tuple[str, ...]  # along which the leaves are replicated
    loaded: Loaded
    moves: tuple[tuple[int, int], ...]  # from a position to a position
    senders: tuple[int, ...]  # after the moves, these blocks are summed along the columns; empty: all have theirs
    relays: tuple[Relay, ...]
    device_bytes: int

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(leaf for relay in self.relays for leaf in relay.leaves)

    @property
    def sending(self) -> frozenset[int]:
        """The positions whose blocks are used by moves or by the sum."""
        return frozenset([*(sender for sender, _ in self.moves), *self.senders])

    def without(self, leaves: Collection[int]) -> RelayGroup:
        """Returns the group without the relays that hold some of these leaves."""
        kept = tuple(relay for relay in self.relays if not set(relay.leaves) & set(leaves))
        return dataclasses.replace(self, relays=kept)


@dataclasses.dataclass(frozen=True)
class LocalPlan:
    """What becomes of leaves of which every block is loaded somewhere."""

    complete: tuple[int, ...]  # every process has loaded what it needs
    groups: tuple[RelayGroup, ...]
    oversized: tuple[int, ...] = ()  # leaves that are larger than a group may be


def plan_relays(
    leaves: Sequence[Leaf], tables: Mapping[int, Columns], loaded: Mapping[int, Loaded], group_bytes: int
) -> LocalPlan:
    """Decides how devices that lack blocks get them from those that have loaded them.

    `loaded` has the leaves that travel. Senders are chosen group by group, so that the bytes that each process sends
    are as equal as possible. Groups with the same senders follow each other: they share programs, which are compiled
    while the groups before them travel. Groups take at most `group_bytes` on a device, except for a leaf that is
    larger.
    """
    alike: dict[tuple[int, tuple[str, ...], Loaded], list[int]] = defaultdict(list)
    for index, pattern in loaded.items():
        alike[leaves[index].mesh or 0, tables[index].axes, pattern].append(index)
    complete: list[int] = []
    groups: list[RelayGroup] = []
    sent: dict[int, int] = defaultdict(int)  # bytes, by process
    for (mesh, axes, pattern), indices in alike.items():
        if pattern == tables[indices[0]].complete:
            complete += indices
            continue
        by_schedule: dict[Schedule, list[RelayGroup]] = defaultdict(list)
        for batch in _groups(leaves, indices, group_bytes):
            size = sum(leaves[index].block_bytes for part in batch for index in part)
            moves, senders = schedule(pattern, tables[indices[0]], size, sent)
            relays = tuple(_relay(part, leaves) for part in batch)
            by_schedule[moves, senders].append(RelayGroup(mesh, axes, pattern, moves, senders, relays, size))
        groups += itertools.chain.from_iterable(by_schedule.values())
    oversized = [index for group in groups for index in group.leaves if leaves[index].block_bytes > group_bytes]
    return LocalPlan(tuple(sorted(complete)), tuple(groups), tuple(oversized))


def _groups(leaves: Sequence[Leaf], indices: Sequence[int], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Yields groups of operands, each with the leaves in it: several small ones or one that is not."""
    small = [index for index in indices if leaves[index].block_bytes < _SMALL]
    large = [index for index in indices if leaves[index].block_bytes >= _SMALL]
    group: list[tuple[int, ...]] = []
    room = most
    for part in [*_batches(small, leaves, max(1, most // 2)), *((index,) for index in large)]:
        size = sum(leaves[index].block_bytes for index in part)
        if group and size > room:
            yield group
            group, room = [], most
        group.append(part)
        room -= size
    if group:
        yield group


def _batches(indices: Sequence[int], leaves: Sequence[Leaf], most: int) -> Iterator[tuple[int, ...]]:
    batch: list[int] = []
    room = most
    for index in indices:
        if batch and leaves[index].block_bytes > room:
            yield tuple(batch)
            batch, room = [], most
        batch.append(index)
        room -= leaves[index].block_bytes
    if batch:
        yield tuple(batch)


def _relay(part: tuple[int, ...], leaves: Sequence[Leaf]) -> Relay:
    sizes = [leaves[index].block_bytes for index in part]
    words = sum(-(-size // _ALIGN) * _ALIGN for size in sizes) // _WORD if sizes[0] < _SMALL else 0
    return Relay(part, words)


def schedule(loaded: Loaded, columns: Columns, size: int, sent: dict[int, int]) -> Schedule:
    """Returns moves from device to device, and the senders of a sum that follows, if one is needed.

    Where enough devices have a block, each sends it to one that lacks it: one move takes as long as the block takes to
    arrive. Otherwise the blocks are summed, which takes nearly twice as long, for any number of devices. Adds to
    `sent` the bytes that processes send.
    """
    having: dict[int, list[int]] = defaultdict(list)
    lacking: dict[int, list[int]] = defaultdict(list)
    for position, column in enumerate(loaded):
        if column != ABSENT:
            having[column].append(position)
        if column != position % columns.count:
            lacking[position % columns.count].append(position)

    owners: list[int] = columns.owners.tolist()

    def send(sender: int) -> int:
        sent[owners[sender]] += size
        return sender

    moves: list[tuple[int, int]] = []
    if all(len(lacking[column]) <= len(having[column]) for column in range(columns.count)):
        for column, receivers in lacking.items():
            if receivers:
                senders_left = LeastBusy(having[column], owners, sent)
                moves += [(send(senders_left.take()), receiver) for receiver in receivers]
        return tuple(moves), ()
    senders = []
    for column in range(columns.count):
        in_place = [position for position in having[column] if position % columns.count == column]
        if not in_place:  # only devices of other columns have it: one device of this column gets it first
            receiver = lacking[column][0]
            moves.append((send(LeastBusy(having[column], owners, sent).first()), receiver))
            in_place = [receiver]
        senders.append(send(LeastBusy(in_place, owners, sent).first()))
    return tuple(moves), tuple(senders)


def _mixed(digits: Sequence[tuple[np.ndarray, int]], count: int) -> np.ndarray:
    """Returns the number with these (digit, base) pairs, first most significant, for each of `count` columns."""
    number = np.zeros(count, np.int64)
    for digit, base in digits:
        number = number * base + digit
    return number
