"""Which device loads which block of a local checkpoint, and who reads from storage what no process has. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from orbax_ext.plan.holders import ABSENT, Columns, LeastBusy, Loaded
from orbax_ext.plan.leaves import Leaf


def deal_all(
    tables: Mapping[int, Columns], leaves: Sequence[int], offers: Mapping[int, Mapping[int, Sequence[int]]]
) -> dict[int, Loaded]:
    """Returns for each leaf what `deal` does. `offers` are by process, then by leaf.

    Most leaves are offered in the same way: it is decided once for all of them.
    """
    processes = sorted(offers)
    dealt: dict[tuple[int, tuple[Sequence[int], ...]], Loaded] = {}
    loaded = {}
    for leaf in leaves:
        key = id(tables[leaf]), tuple(offers[process][leaf] for process in processes)
        if key not in dealt:
            dealt[key] = deal(tables[leaf], dict(zip(processes, key[1], strict=True)))
        loaded[leaf] = dealt[key]
    return loaded


def deal(columns: Columns, offers: Mapping[int, Sequence[int]]) -> Loaded:
    """Returns the block that each device loads, from what processes offer, see `Columns.offers`.

    A device loads its own block. A process that lacks blocks of its devices loads others in their place. As many
    different blocks as possible are loaded: where a block would be loaded by nobody, a device loads it instead of its
    own block if another process loads that.
    """
    loads = [ABSENT] * len(columns.owners)
    held: dict[int, set[int]] = {}  # what processes have that have blocks for others
    for process in sorted(offers):
        places, offer = columns.of_process(process), offers[process]
        for place, column in zip(places, offer, strict=False):
            loads[place] = column
        if len(offer) > len(places):
            held[process] = set(offer) - {ABSENT}
    if held:
        dealing = _Dealing(columns, loads, held)
        for column in sorted(set(range(columns.count)) - set(loads)):
            dealing.find_place(column)
        dealing.fill()
    return tuple(loads)


class _Dealing:
    """Changes `loads`, in which devices load only their own blocks."""

    def __init__(self, columns: Columns, loads: list[int], held: Mapping[int, set[int]]) -> None:
        self._columns = columns
        self._loads = loads
        self._held = held
        self._times = Counter(loads)  # that each column is loaded
        self._dead: set[int] = set()  # places from which no search leads on
        self._holders: dict[int, list[int]] = defaultdict(list)  # processes, by column
        for process, all_of_it in held.items():
            for column in all_of_it:
                self._holders[column].append(process)

    def find_place(self, column: int) -> None:
        """Lets a device load a block that nobody loads, if possible; other blocks may be loaded elsewhere for it."""
        free = (place for place in self._places(column) if self._loads[place] == ABSENT)
        if (place := next(free, None)) is not None:
            self._load(place, column)
            return
        comes_to: dict[int, int] = {}  # by place, the column that would be loaded there
        was_at: dict[int, int] = {}  # by column, its only place
        queue = deque([column])
        while queue:
            wanted = queue.popleft()
            for place in self._places(wanted):
                if place in comes_to or place in self._dead:
                    continue
                comes_to[place], there = wanted, self._loads[place]
                if there == ABSENT or self._times[there] > 1:
                    while True:
                        moved = comes_to[place]
                        self._load(place, moved)
                        if moved == column:
                            return
                        place = was_at[moved]
                was_at[there] = place
                queue.append(there)
        self._dead |= comes_to.keys()

    def fill(self) -> None:
        """Lets devices that load nothing yet load what their process has, what the fewest load first."""
        for process, held in self._held.items():
            places = self._columns.of_process(process)
            others = held - {self._loads[place] for place in places}
            ranked = iter(sorted(others, key=lambda column: (self._times[column], column)))
            for place in places:
                if self._loads[place] == ABSENT and (column := next(ranked, None)) is not None:
                    self._load(place, column)

    def _places(self, column: int) -> list[int]:
        """Returns the devices that can load a block."""
        return [place for process in self._holders[column] for place in self._columns.of_process(process)]

    def _load(self, place: int, column: int) -> None:
        self._times[self._loads[place]] -= 1
        self._times[column] += 1
        self._loads[place] = column


@dataclasses.dataclass(frozen=True)
class Gaps:
    """What no process has."""

    leaves: frozenset[int]  # of which nobody has any block
    blocks: Mapping[int, Mapping[int, int]]  # of other leaves: for each, positions that read a block, and its column


def find_gaps(leaves: Sequence[Leaf], tables: Mapping[int, Columns], loaded: Mapping[int, Loaded]) -> Gaps:
    """Returns what has to come from storage, and who reads the blocks, so that all processes read as much."""
    read: dict[int, int] = defaultdict(int)  # bytes, by process
    readers: dict[tuple[int, Loaded], _GapReaders] = {}  # leaves with the same holders have the same gaps
    nobody: set[int] = set()
    blocks: dict[int, dict[int, int]] = {}
    for index, pattern in loaded.items():
        key = id(tables[index]), pattern
        if key not in readers:
            readers[key] = _GapReaders(tables[index], pattern, read)
        if readers[key].missing == tables[index].count:
            nobody.add(index)
        elif readers[key].missing:
            blocks[index] = readers[key].choose(leaves[index].block_bytes)
    return Gaps(frozenset(nobody), blocks)


class _GapReaders:
    """The devices that can read the blocks of a leaf that nobody has. `read` are the bytes that each process reads."""

    def __init__(self, columns: Columns, pattern: Loaded, read: dict[int, int]) -> None:
        self._owners: list[int] = columns.owners.tolist()
        self._count = columns.count
        self._pattern = pattern
        self._read = read
        missing = sorted(set(range(columns.count)) - set(pattern))
        self.missing = len(missing)
        if self.missing == columns.count:
            return
        free = {
            column: [at for at in range(column, len(pattern), columns.count) if pattern[at] == ABSENT]
            for column in missing
        }
        self._needing = {column: LeastBusy(free[column], self._owners, read) for column in missing if free[column]}
        self._needless = [column for column in missing if not free[column]]  # devices that need it have loaded others

    def choose(self, size: int) -> dict[int, int]:
        """Returns who reads which column, and counts so many bytes for each.

        A device reads a block that it needs, if one has loaded nothing else. Else one that has loaded nothing, or what
        others have loaded too, reads it for others.
        """
        readers = {}
        for column, places in self._needing.items():
            reader = places.first()
            readers[reader] = column
            self._read[self._owners[reader]] += size
        if self._needless:
            times = Counter(self._pattern[at] for at in range(len(self._pattern)) if at not in readers)
            for column in self._needless:
                spare = (
                    at
                    for at, there in enumerate(self._pattern)
                    if at not in readers and (there == ABSENT or times[there] > 1)
                )
                reader = min(spare, key=self._cost)
                times[self._pattern[reader]] -= 1
                readers[reader] = column
                self._read[self._owners[reader]] += size
        return readers

    def _cost(self, at: int) -> tuple[int, int, int]:
        there = self._pattern[at]
        preferred = (
            0 if there == ABSENT else 2 if there == at % self._count else 1
        )  # it keeps its own block if possible
        return preferred, self._read[self._owners[at]], at


def fill(loaded: Mapping[int, Loaded], gaps: Gaps) -> dict[int, Loaded]:
    """Returns what all devices have once the gaps are filled, without the leaves of which nobody has any block."""
    return {
        index: _filled(pattern, gaps.blocks[index]) if index in gaps.blocks else pattern
        for index, pattern in loaded.items()
        if index not in gaps.leaves
    }


def _filled(pattern: Loaded, readers: Mapping[int, int]) -> Loaded:
    filled = list(pattern)
    for at, column in readers.items():
        filled[at] = column
    return tuple(filled)
