"""Who loads which block of a local checkpoint, and who reads from storage what no process has."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from orbax_ext.plan.holders import ABSENT, Columns, Loaded
from orbax_ext.plan.loads import Gaps, deal, deal_all, fill, find_gaps
from orbax_ext.plan.topology import MeshInfo
from tests.support.local_leaves import REPLICATED, SHARDED, TWO_HOSTS, columns_of, leaf

pytestmark = pytest.mark.once

# 4 processes x 1 device that needs a block of its own.
EACH_ITS_OWN = MeshInfo(("dp", "tp"), (1, 4), (0, 1, 2, 3))


def test_a_device_loads_a_block_for_others_if_its_own_is_not_there() -> None:
    columns = Columns(TWO_HOSTS, SHARDED)
    nothing = (ABSENT, ABSENT)
    assert deal(columns, {0: (ABSENT, ABSENT, 2, 3), 1: nothing, 2: nothing, 3: nothing}) == (2, 3, *[ABSENT] * 6)
    assert deal(columns, {0: (ABSENT, 1, 3), 1: nothing, 2: nothing, 3: nothing}) == (3, 1, *[ABSENT] * 6)


def test_every_block_on_some_disk_is_loaded() -> None:
    columns = Columns(EACH_ITS_OWN, SHARDED)
    # Processes 0 and 2 have blocks 0 and 1, the others 2 and 3.
    assert deal(columns, {0: (0, 1), 1: (ABSENT, 2, 3), 2: (ABSENT, 0, 1), 3: (3, 2)}) == (0, 2, 1, 3)


def test_a_device_leaves_its_own_block_to_others_for_one_that_nobody_else_can_load() -> None:
    columns = Columns(EACH_ITS_OWN, SHARDED)
    assert deal(columns, {0: (0, 1), 1: (ABSENT, 0), 2: (2,), 3: (3,)}) == (1, 0, 2, 3)
    assert deal(columns, {0: (0, 1), 1: (ABSENT,), 2: (2,), 3: (3,)}) == (0, ABSENT, 2, 3)


def test_leaves_that_are_offered_in_the_same_way_share_their_entry() -> None:
    columns = Columns(EACH_ITS_OWN, SHARDED)
    offers = {process: dict.fromkeys(range(3), (process,)) for process in range(4)}
    offers[1][2] = (ABSENT,)
    dealt = deal_all(columns_of(3, columns), range(3), offers)
    assert dealt == {0: columns.complete, 1: columns.complete, 2: (0, ABSENT, 2, 3)}
    assert dealt[0] is dealt[1]


def test_gaps_are_dealt_out_among_those_that_need_the_block() -> None:
    columns = Columns(TWO_HOSTS, SHARDED)
    loaded = dict.fromkeys(range(2), (0, 1, ABSENT, ABSENT, 0, 1, ABSENT, ABSENT))
    gaps = find_gaps([leaf(TWO_HOSTS)] * 2, columns_of(2, columns), loaded)
    assert gaps.leaves == frozenset()
    assert gaps.blocks == {0: {2: 2, 7: 3}, 1: {2: 2, 7: 3}}


def test_leaves_that_nobody_has_are_read_whole() -> None:
    columns = Columns(TWO_HOSTS, SHARDED)
    loaded = {0: (ABSENT,) * 8, 1: columns.complete}
    gaps = find_gaps([leaf(TWO_HOSTS)] * 2, columns_of(2, columns), loaded)
    assert gaps == Gaps(frozenset({0}), {})
    assert fill(loaded, gaps) == {1: columns.complete}


def test_a_gap_is_read_for_others_if_those_that_need_it_have_loaded_something_else() -> None:
    columns = Columns(EACH_ITS_OWN, SHARDED)
    mesh_leaf = leaf(EACH_ITS_OWN)
    assert find_gaps([mesh_leaf], {0: columns}, {0: (0, 2, 0, 3)}) == Gaps(frozenset(), {0: {2: 1}})
    assert find_gaps([mesh_leaf], {0: columns}, {0: (0, 2, ABSENT, 3)}) == Gaps(frozenset(), {0: {2: 1}})


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A table of devices, and the blocks that each process has stored."""

    columns: Columns
    held: dict[int, set[int]]

    def offers(self) -> dict[int, tuple[int, ...]]:
        offers = {}
        for process, held in self.held.items():
            needed = [place % self.columns.count for place in self.columns.of_process(process)]
            own = [column if column in held else ABSENT for column in needed]
            offers[process] = (*own, *sorted(held - set(needed)))
        return offers

    def most(self) -> int:
        """Returns how many different blocks can be loaded, one by each device."""
        block_at: dict[int, int] = {}

        def find_place(block: int, tried: set[int]) -> bool:
            for process, held in self.held.items():
                for place in self.columns.of_process(process) if block in held else []:
                    if place not in tried:
                        tried.add(place)
                        if place not in block_at or find_place(block_at[place], tried):
                            block_at[place] = block
                            return True
            return False

        return sum(find_place(block, set()) for block in range(self.columns.count))


@st.composite
def hosts(draw: st.DrawFn) -> Hosts:
    replicas, processes, devices = (draw(st.integers(1, most)) for most in (3, 4, 3))
    owners = tuple(draw(st.permutations([p for p in range(replicas * processes) for _ in range(devices)])))
    columns = Columns(
        MeshInfo(("dp", "tp"), (replicas, processes * devices), owners), draw(st.sampled_from([SHARDED, REPLICATED]))
    )
    stored = st.sets(st.integers(0, columns.count - 1), max_size=2 * devices)
    return Hosts(columns, {process: draw(stored) for process in range(replicas * processes)})


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(drawn=hosts())
def test_as_many_blocks_as_possible_are_loaded(drawn: Hosts) -> None:
    loaded: Loaded = deal(drawn.columns, drawn.offers())
    for place, column in enumerate(loaded):
        assert column == ABSENT or column in drawn.held[int(drawn.columns.owners[place])]
    assert len(set(loaded) - {ABSENT}) == drawn.most()
