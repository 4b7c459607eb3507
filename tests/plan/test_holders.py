"""Who loads which block of a local checkpoint, who reads what nobody has, and who sends it to whom."""

from __future__ import annotations

import itertools
from collections import defaultdict

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from orbax_ext.plan import holders
from orbax_ext.plan.holders import ABSENT, Columns, StoredChunks
from orbax_ext.plan.loads import fill, find_gaps
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import relay_traffic
from tests.support.local_leaves import ONE_HOST, REPLICATED, SHARDED, TWO_HOSTS, columns_of, leaf

pytestmark = pytest.mark.once

GROUP = 1 << 20


def test_one_device_of_each_process_receives_what_several_need() -> None:
    assert Columns(ONE_HOST, REPLICATED).table.tolist() == [[0], [2], [4], [6]]
    assert Columns(ONE_HOST, SHARDED).table.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_all_devices_are_listed_where_columns_would_differ_in_length() -> None:
    uneven = MeshInfo(("dp", "tp"), (2, 2), (0, 0, 0, 1))
    assert Columns(uneven, SHARDED).table.tolist() == [[0, 1], [2, 3]]


def test_blocks_are_numbered_as_the_spec_cuts_them() -> None:
    mesh = MeshInfo(("a", "b", "c"), (2, 2, 2), tuple(range(8)))
    columns = Columns(mesh, (("b", "a"), ()))  # b varies slowest
    assert columns.axes == ("c",)
    assert columns.blocks == ((0, 0), (2, 0), (1, 0), (3, 0))


def test_a_process_offers_the_blocks_that_its_devices_need_and_then_others() -> None:
    columns = Columns(TWO_HOSTS, SHARDED)
    stored = StoredChunks((8, 8), (2, 8), frozenset({(2, 0), (3, 0)}))
    assert columns.offers(3, leaf(TWO_HOSTS), stored) == (2, 3)
    assert columns.offers(0, leaf(TWO_HOSTS), stored) == (ABSENT, ABSENT, 2, 3)
    stored = StoredChunks((8, 8), (2, 8), frozenset({(0, 0), (1, 0), (3, 0)}))
    assert columns.offers(0, leaf(TWO_HOSTS), stored) == (0, 1, 3)
    assert columns.offers(1, leaf(TWO_HOSTS), stored) == (ABSENT, 3, 0, 1)


def test_a_process_with_very_many_blocks_offers_some_of_them() -> None:
    mesh = MeshInfo(("dp", "tp"), (1, 512), tuple(range(512)))
    columns = Columns(mesh, SHARDED)
    stored = StoredChunks((512, 8), (1, 8), frozenset((row, 0) for row in range(512)))
    offers = columns.offers(500, leaf(mesh, rows=512), stored)
    assert offers == (500, *range(501, 512), *range(53))


def test_blocks_are_loaded_from_other_chunks_if_all_of_them_are_there() -> None:
    columns = Columns(TWO_HOSTS, SHARDED)
    halves = StoredChunks((8, 8), (1, 4), frozenset({(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}))
    assert columns.offers(0, leaf(TWO_HOSTS), halves) == (0, ABSENT)


def test_an_array_of_another_shape_is_not_loaded() -> None:
    columns = Columns(TWO_HOSTS, SHARDED)
    assert columns.offers(0, leaf(TWO_HOSTS), StoredChunks((16, 8), (2, 8), frozenset({(0, 0)}))) == (ABSENT, ABSENT)


def test_nothing_travels_if_all_have_it() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    plan = holders.plan_relays([leaf(ONE_HOST)], {0: columns}, {0: columns.complete}, GROUP)
    assert plan == holders.LocalPlan((0,), ())


def test_each_holder_sends_to_one_that_lacks_it() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    moves, senders = holders.schedule((0, 1, ABSENT, ABSENT, 0, 1, 0, 1), columns, 100, defaultdict(int))
    assert senders == ()
    assert moves == ((0, 2), (5, 3))  # process 0 has sent a block already


def test_a_single_holder_of_four_sends_by_a_sum() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    moves, senders = holders.schedule((ABSENT,) * 6 + (0, 1), columns, 100, defaultdict(int))
    assert (moves, senders) == ((), (6, 7))


def test_senders_of_many_leaves_send_as_much_as_each_other() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    leaves = [leaf(ONE_HOST, rows=512, width=1024) for _ in range(12)]
    loaded = dict.fromkeys(range(12), (ABSENT, ABSENT, 0, 1, 0, 1, 0, 1))
    plan = holders.plan_relays(leaves, columns_of(12, columns), loaded, 4 << 20)
    sent = [sum(one.sent for one in relay_traffic(plan.groups, columns_of(12, columns), leaves, p)) for p in range(4)]
    assert sent == [0, *[leaves[0].block_bytes * 12 * 2 // 3] * 3]
    assert max(group.device_bytes for group in plan.groups) <= 4 << 20
    schedules = [group.moves for group in plan.groups]
    assert [moves for moves, _ in itertools.groupby(schedules)] == list(dict.fromkeys(schedules))  # compiled once


def test_small_leaves_with_the_same_holders_travel_as_one_vector() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    loaded = {
        0: (ABSENT, ABSENT, *(0, 1) * 3),
        1: (ABSENT, ABSENT, *(0, 1) * 3),
        2: (0, 1, ABSENT, ABSENT, *(0, 1) * 2),
    }
    plan = holders.plan_relays([leaf(ONE_HOST)] * 3, columns_of(3, columns), loaded, GROUP)
    assert [group.leaves for group in plan.groups] == [(0, 1), (2,)]
    assert [relay.words for group in plan.groups for relay in group.relays] == [2 * 4 * 8, 4 * 8]


def test_leaves_that_are_larger_than_a_group_are_named() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    leaves = [leaf(ONE_HOST), leaf(ONE_HOST, rows=512, width=1024), leaf(ONE_HOST, rows=512, width=1024)]
    loaded = dict.fromkeys(range(2), (ABSENT, ABSENT, *(0, 1) * 3)) | {2: columns.complete}
    assert holders.plan_relays(leaves, columns_of(3, columns), loaded, 1 << 20).oversized == ()
    assert holders.plan_relays(leaves, columns_of(3, columns), loaded, (1 << 20) - 1).oversized == (1,)


def test_leaves_that_travel_with_a_damaged_one_are_taken_out_with_it() -> None:
    columns = Columns(ONE_HOST, SHARDED)
    leaves = [leaf(ONE_HOST), leaf(ONE_HOST), leaf(ONE_HOST, rows=512, width=1024)]
    loaded = dict.fromkeys(range(3), (ABSENT, ABSENT, *(0, 1) * 3))
    (group,) = holders.plan_relays(leaves, columns_of(3, columns), loaded, 4 << 20).groups
    assert group.without([1]).leaves == (2,)
    assert group.without([2]).leaves == (0, 1)


class CountedReads(defaultdict[int, int]):
    """Counts how often it is asked."""

    asked = 0

    def __getitem__(self, process: int) -> int:
        self.asked += 1
        return super().__getitem__(process)


def test_a_schedule_looks_at_each_device_a_few_times_only() -> None:
    hosts, lost = 512, 128
    mesh = MeshInfo(("dp", "tp"), (hosts, 2), tuple(np.repeat(range(hosts), 2).tolist()))
    loaded = (ABSENT,) * (2 * lost) + (0, 1) * (hosts - lost)
    sent = CountedReads(int)
    moves, _ = holders.schedule(loaded, Columns(mesh, SHARDED), 1, sent)
    assert len(moves) == 2 * lost
    assert sent.asked < 10 * len(loaded)  # not as often as there are pairs of a sender and a receiver


@st.composite
def loads(draw: st.DrawFn) -> tuple[MeshInfo, Columns, holders.Loaded]:
    """Draws what the devices of a table have loaded: what they need, something else, or nothing."""
    replicas, hosts, devices = (draw(st.integers(1, most)) for most in (5, 3, 3))
    processes = tuple(np.repeat(range(replicas * hosts), devices).tolist())
    mesh = MeshInfo(("dp", "tp"), (replicas, hosts * devices), processes)
    columns = Columns(mesh, draw(st.sampled_from([SHARDED, REPLICATED])))
    entry = st.one_of(st.just(True), st.booleans(), st.integers(0, columns.count - 1))
    drawn = [draw(entry) for _ in range(len(columns.owners))]
    return (
        mesh,
        columns,
        tuple(
            (at % columns.count if entry else ABSENT) if isinstance(entry, bool) else entry
            for at, entry in enumerate(drawn)
        ),
    )


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(drawn=loads())
def test_every_device_has_its_block_in_the_end(drawn: tuple[MeshInfo, Columns, holders.Loaded]) -> None:
    mesh, columns, loaded = drawn
    gaps = find_gaps([leaf(mesh, rows=12, width=12)], {0: columns}, {0: loaded})
    assert gaps.leaves == ({0} if set(loaded) == {ABSENT} else set())
    if gaps.leaves:
        return
    filled = fill({0: loaded}, gaps)[0]
    assert set(filled) >= set(range(columns.count))
    assert set(gaps.blocks.get(0, {}).values()) == set(range(columns.count)) - set(loaded)
    moves, senders = holders.schedule(filled, columns, 1, defaultdict(int))
    assert arrived(filled, columns, moves, senders) == columns.complete


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(drawn=loads(), before=st.lists(st.integers(0, 3), min_size=15, max_size=15))
def test_the_least_busy_device_sends(drawn: tuple[MeshInfo, Columns, holders.Loaded], before: list[int]) -> None:
    _, columns, loaded = drawn
    if set(loaded) >= set(range(columns.count)):
        sent, expected = (defaultdict(int, enumerate(before)) for _ in range(2))
        assert holders.schedule(loaded, columns, 2, sent) == simple_schedule(loaded, columns, 2, expected)
        assert sent == expected


def simple_schedule(loaded: holders.Loaded, columns: Columns, size: int, sent: dict[int, int]) -> holders.Schedule:
    """Returns what `schedule` does, by looking at all holders of a block for each receiver."""
    count, owners = columns.count, columns.owners.tolist()
    having = {column: [at for at, there in enumerate(loaded) if there == column] for column in range(count)}
    receivers = [at for at, there in enumerate(loaded) if there != at % count]
    moves: list[tuple[int, int]] = []

    def send(places: list[int]) -> int:
        sender = min(places, key=lambda at: (sent[owners[at]], at))
        sent[owners[sender]] += size
        return sender

    if all(sum(at % count == column for at in receivers) <= len(having[column]) for column in range(count)):
        for receiver in sorted(receivers, key=lambda at: (receivers.index(next_in_column(at, receivers, count)), at)):
            moves.append((send(having[receiver % count]), receiver))
            having[receiver % count].remove(moves[-1][0])
        return tuple(moves), ()
    senders = []
    for column in range(count):
        in_place = [at for at in having[column] if at % count == column]
        if not in_place:
            in_place = [next(at for at in receivers if at % count == column)]
            moves.append((send(having[column]), in_place[0]))
        senders.append(send(in_place))
    return tuple(moves), tuple(senders)


def next_in_column(at: int, receivers: list[int], count: int) -> int:
    """Returns the first receiver of the same column."""
    return next(other for other in receivers if other % count == at % count)


def arrived(
    loaded: holders.Loaded, columns: Columns, moves: tuple[tuple[int, int], ...], senders: tuple[int, ...]
) -> holders.Loaded:
    """Returns which block each device has after the moves and the sum."""
    assert len({sender for sender, _ in moves}) == len({receiver for _, receiver in moves}) == len(moves)
    after = list(loaded)
    for sender, receiver in moves:
        after[receiver] = loaded[sender]
    if senders:
        assert sorted(at % columns.count for at in senders) == list(range(columns.count))
        by_column = {at % columns.count: after[at] for at in senders}
        after = [by_column[at % columns.count] for at in range(len(after))]
    return tuple(after)
