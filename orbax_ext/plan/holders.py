"""Leaves that some processes have in a local checkpoint and others lack: who loads which block, and who sends it. Pure.

A block is known by its column in a table of devices: all devices of a column need the same block. The table has one
device of each process in a column; the process's other devices copy from that one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from orbax_ext.plan.bundles import Pack
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo, infer_axes

_SMALL = 128 << 10  # bytes of a block below which leaves travel as one vector: an operand of its own costs more
_ALIGN, _WORD = 8, 4  # bytes, as in a `Pack`

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

    @property
    def complete(self) -> Loaded:
        """What the devices have loaded if each has the block that it needs."""
        return tuple(range(self.count)) * len(self.table)

    def of_process(self, process: int) -> list[int]:
        """Returns the positions in the table, row by row, of a process's devices."""
        return self._of_process[process]

    def loads(self, process: int, leaf: Leaf, stored: StoredChunks) -> tuple[int, ...]:
        """Returns for each of a process's devices the column of the block to load from what the process has stored.

        A device loads the block that it needs. If that is not there, it loads another block, for other devices: after
        a restart, a process may have another place in the mesh.
        """
        positions = self.of_process(process)
        needed = [position % self.count for position in positions]
        held = self._held(set(needed), leaf, stored)
        others = iter(sorted(held - set(needed)))
        return tuple(column if column in held else next(others, ABSENT) for column in needed)

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


@dataclasses.dataclass(frozen=True)
class Gaps:
    """What no process has."""

    leaves: frozenset[int]  # of which nobody has any block
    blocks: Mapping[int, Mapping[int, int]]  # of other leaves: for each, positions that read a block, and its column


def find_gaps(leaves: Sequence[Leaf], tables: Mapping[int, Columns], loaded: Mapping[int, Loaded]) -> Gaps:
    """Returns what has to come from storage, and who reads the blocks, so that all processes read as much."""
    nobody: set[int] = set()
    blocks: dict[int, dict[int, int]] = {}
    read: dict[int, int] = defaultdict(int)  # bytes, by process
    for index, pattern in loaded.items():
        columns = tables[index]
        if set(pattern) == {ABSENT}:
            nobody.add(index)
            continue
        for column in sorted(set(range(columns.count)) - set(pattern)):
            free = [at for at in range(column, len(pattern), columns.count) if pattern[at] == ABSENT]
            if not free:  # all devices of the column have loaded blocks for others
                nobody.add(index)
                blocks.pop(index, None)
                break
            reader = min(free, key=lambda at: (read[int(columns.owners[at])], at))
            read[int(columns.owners[reader])] += leaves[index].block_bytes
            blocks.setdefault(index, {})[reader] = column
    return Gaps(frozenset(nobody), blocks)


def fill(loaded: Mapping[int, Loaded], gaps: Gaps) -> dict[int, Loaded]:
    """Returns what all devices have once the gaps are filled, without the leaves of which nobody has any block."""
    return {
        index: tuple(gaps.blocks.get(index, {}).get(at, column) for at, column in enumerate(pattern))
        for index, pattern in loaded.items()
        if index not in gaps.leaves
    }


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

    def without(self, leaves: Collection[int]) -> RelayGroup:
        """Returns the group without the relays that hold some of these leaves."""
        kept = tuple(relay for relay in self.relays if not set(relay.leaves) & set(leaves))
        return dataclasses.replace(self, relays=kept)


@dataclasses.dataclass(frozen=True)
class LocalPlan:
    """What becomes of leaves of which every block is loaded somewhere."""

    complete: tuple[int, ...]  # every process has loaded what it needs
    groups: tuple[RelayGroup, ...]


def plan_relays(
    leaves: Sequence[Leaf], tables: Mapping[int, Columns], loaded: Mapping[int, Loaded], group_bytes: int
) -> LocalPlan:
    """Decides how devices that lack blocks get them from those that have loaded them.

    `loaded` has the leaves that travel. Senders are chosen group by group, so that the bytes that each process sends
    are as equal as possible. Groups with the same senders follow each other: they share programs, which are compiled
    while the groups before them travel. Groups take at most `group_bytes` on a device, except for a leaf that is
    larger.
    """
    complete = [index for index in loaded if loaded[index] == tables[index].complete]
    alike: dict[tuple[int, tuple[str, ...], Loaded], list[int]] = defaultdict(list)
    for index in loaded:
        if loaded[index] != tables[index].complete:
            alike[leaves[index].mesh or 0, tables[index].axes, loaded[index]].append(index)
    groups: list[RelayGroup] = []
    sent: dict[int, int] = defaultdict(int)  # bytes, by process
    for (mesh, axes, pattern), indices in alike.items():
        by_schedule: dict[Schedule, list[RelayGroup]] = defaultdict(list)
        for batch in _groups(leaves, indices, group_bytes):
            size = sum(leaves[index].block_bytes for part in batch for index in part)
            moves, senders = schedule(pattern, tables[indices[0]], size, sent)
            relays = tuple(_relay(part, leaves) for part in batch)
            by_schedule[moves, senders].append(RelayGroup(mesh, axes, pattern, moves, senders, relays, size))
        groups += itertools.chain.from_iterable(by_schedule.values())
    return LocalPlan(tuple(complete), tuple(groups))


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

    def least_busy(positions: Sequence[int]) -> int:
        chosen = min(positions, key=lambda position: (sent[int(columns.owners[position])], position))
        sent[int(columns.owners[chosen])] += size
        return chosen

    moves: list[tuple[int, int]] = []
    if all(len(lacking[column]) <= len(having[column]) for column in range(columns.count)):
        for column, receivers in lacking.items():
            for receiver in receivers:
                sender = least_busy(having[column])
                having[column].remove(sender)
                moves.append((sender, receiver))
        return tuple(moves), ()
    senders = []
    for column in range(columns.count):
        in_place = [position for position in having[column] if position % columns.count == column]
        if not in_place:  # only devices of other columns have it: one device of this column gets it first
            receiver = lacking[column][0]
            moves.append((least_busy(having[column]), receiver))
            in_place = [receiver]
        senders.append(least_busy(in_place))
    return tuple(moves), tuple(senders)


def _mixed(digits: Sequence[tuple[np.ndarray, int]], count: int) -> np.ndarray:
    """Returns the number with these (digit, base) pairs, first most significant, for each of `count` columns."""
    number = np.zeros(count, np.int64)
    for digit, base in digits:
        number = number * base + digit
    return number
