"""All processes decide the same who reads what, however late, stuck or failing they are, and nothing is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_ext.plan import Group, LeafBatch, MeshInfo
from orbax_ext.plan.course import Course, Share, if_late
from tests.support.arriving import Arriving
from tests.support.courses import LEAVES, MESH, WIDE, make_course, readers_by_column

pytestmark = pytest.mark.once

TROUBLED_MEETINGS = 20  # later, all processes are well: each meeting begins an exchange, or ends the restore


@pytest.mark.parametrize("mesh", [MESH, WIDE], ids=str)
@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["spread", "single"]), st.data())
def test_everything_arrives_whoever_is_late(mesh: MeshInfo, strategy: str, data: st.DataObject) -> None:
    courses = [make_course(strategy, mesh) for _ in range(2)]  # on two processes
    arriving = Arriving(mesh)
    meetings = 0
    while courses[0].groups_left:
        meetings += 1
        assert meetings <= TROUBLED_MEETINGS + len(courses[0].order)
        shares = {}
        for process in range(4):
            trouble = data.draw(st.sampled_from(["", "", "", "late", "failed"])) if meetings < TROUBLED_MEETINGS else ""
            upto = min(courses[0].ends.front + data.draw(st.integers(1, 6)), courses[0].ends.back)
            shares[process] = Share(
                upto,
                data.draw(st.sampled_from([None, 0.0, 1e6, 1e7, 1.2e7])),
                late=trouble == "late",
                failed={"error": "OSError"} if trouble == "failed" else None,
                lacks=draw_lacking(data, courses[0], upto) if trouble == "late" else (),
                long=data.draw(st.booleans()),
                begun=data.draw(st.integers(courses[0].ends.front + 1, upto)),
            )
        told = [Share.from_json(share.to_json()) for share in shares.values()]
        assert told == [*shares.values()]
        group = courses[0].group(courses[0].ends.front)
        if not all(share.ready for share in shares.values()):
            added = [course.take_over(shares) for course in courses]
            assert added[0] == added[1]
            late = {process for process, share in shares.items() if not share.ready}
            if added[0] is None:
                assert any(set(owners) <= late for owners in mesh.owners(group.axes).T.tolist())  # nobody has a block
                continue
            for number in added[0]:
                assert not set().union(*readers_by_column(courses[0].plan.groups[number], mesh)) & late
        added = [course.leave_slow(shares) for course in courses]
        assert added[0] == added[1]
        for course in courses:
            begun = max(share.upto for share in shares.values())
            before = [course.group(place) for place in range(course.ends.front, min(begun, course.ends.back))]
            course.deal(shares)
            after = [course.group(place) for place in range(course.ends.front, min(begun, course.ends.back))]
            assert before == after  # somebody has begun to read these
        assert courses[0].plan == courses[1].plan
        assert courses[0].order == courses[1].order
        group = courses[0].group(courses[0].ends.front)
        arriving.exchange(group, courses[0].plan.leaves)
        for course in courses:
            course.next()
    assert set(arriving.blocks) == set(range(len(LEAVES)))
    for index, block in arriving.blocks.items():
        assert block.all(), f"{courses[0].plan.leaves[index]} has holes"


def decide(course: Course, shares: dict[int, Share], boundary: int) -> tuple[list[int], int | None] | None:
    """Does what a process does after a meeting: returns the groups that it reads directly now, and what is exchanged.

    Returns None if nobody can read what is late.
    """
    if not course.groups_left:
        lacking = any(share.lacks for share in shares.values())
        return None if lacking and course.take_over_direct(shares) is None else ([], None)
    if not all(share.ready for share in shares.values()) and course.take_over(shares) is None:
        return None
    course.leave_slow(shares)
    course.deal(shares)
    moved = [] if course.catching_up else course.move_boundary(boundary)
    ends = course.ends
    if ends.front == ends.back:
        return moved, None
    course.next()
    return moved, course.order[ends.front]


@pytest.mark.parametrize("mesh", [MESH, WIDE], ids=str)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_two_processes_divide_a_restore_in_the_same_way_and_everything_arrives_once(
    mesh: MeshInfo, data: st.DataObject
) -> None:
    courses = [make_course("spread", mesh) for _ in range(2)]
    arriving, meetings = Arriving(mesh), 0
    back: set[int] = set()  # groups that are being read directly
    while courses[0].groups_left or back:
        meetings += 1
        assert meetings <= TROUBLED_MEETINGS + len(courses[0].order) + 1
        ends, groups_left = courses[0].ends, courses[0].groups_left
        shares = draw_shares(data, courses[0], sorted(back), troubled=meetings < TROUBLED_MEETINGS)
        untouched = max(share.upto for share in shares.values())
        boundary = data.draw(st.sampled_from([ends.back, (untouched + ends.back) // 2, untouched, ends.front]))
        received = {process: Share.from_json(shares[process].to_json()) for process in (3, 1, 0, 2)}
        decided, same = decide(courses[0], shares, boundary), decide(courses[1], received, boundary)
        assert decided == same
        for name in ("plan", "order", "ends", "carried_out"):
            assert getattr(courses[0], name) == getattr(courses[1], name)
        assert ends.front <= courses[0].ends.front <= courses[0].ends.back <= len(courses[0].order)
        if decided is None:
            continue
        moved, exchanged = decided
        assert not back & set(moved)
        back |= set(moved)
        if exchanged is not None:
            assert exchanged not in back
            arriving.exchange(courses[0].plan.groups[exchanged], courses[0].plan.leaves)
        if not groups_left:
            for number in back - {number for share in shares.values() for number in share.lacks}:
                arriving.read_directly(courses[0].as_planned(number), courses[0].plan.leaves)
            back = set()
    assert set(arriving.blocks) == set(range(len(LEAVES)))
    for index, block in arriving.blocks.items():
        assert block.all(), f"{courses[0].plan.leaves[index]} has holes"


def draw_lacking(data: st.DataObject, course: Course, upto: int) -> tuple[int, ...]:
    """Returns what a late process may lack: the next group, and others that it may have begun to read."""
    first, *others = course.order[course.ends.front : upto]
    return (first, *(number for number in others if data.draw(st.booleans())))


def draw_shares(data: st.DataObject, course: Course, back: Sequence[int], *, troubled: bool) -> dict[int, Share]:
    """Returns what four processes may tell, where `back` are the groups that they read directly."""
    shares, ends = {}, course.ends
    for process in range(4):
        trouble = data.draw(st.sampled_from(["", "", "", "late", "failed"])) if troubled else ""
        rate = data.draw(st.sampled_from([None, 0.0, 1e6, 1e7, 1.2e7]))
        failed = {"error": "OSError"} if trouble == "failed" else None
        long = data.draw(st.booleans())
        if ends.front < ends.back:
            upto = min(ends.front + data.draw(st.integers(1, 6)), ends.back)
            lacks = draw_lacking(data, course, upto) if trouble == "late" else ()
            begun = data.draw(st.integers(ends.front + 1, upto))
            late = trouble == "late"
            shares[process] = Share(upto, rate, late=late, failed=failed, lacks=lacks, long=long, begun=begun)
        else:
            lacks = tuple(sorted(data.draw(st.sets(st.sampled_from(back), min_size=1)))) if trouble else ()
            late = trouble == "late"
            shares[process] = Share(ends.back, rate, late=late, failed=failed, lacks=lacks, long=long)
    return shares


def test_a_host_that_recovers_gets_its_shares_back() -> None:
    course = make_course("spread")
    planned = course.plan.groups

    def deal(*rates: float) -> None:
        course.deal({process: Share(1, rate, long=True) for process, rate in enumerate(rates)})

    deal(1e8, 1e8, 1e7, 1e8)
    assert course.plan.groups[0] == planned[0]  # it has begun
    assert course.plan.groups[1:] != planned[1:]
    slow = course.plan.groups
    deal(1e8, 1.1e8, 1e7, 1e8)
    assert course.plan.groups is slow  # the same, but for noise
    deal(1e8, 1e8, 1e8, 1e8)
    assert course.plan.groups == planned


def test_who_is_late_leaves_all_that_the_others_may_read_meanwhile() -> None:
    course = make_course("spread")
    lacks = (0, 2, 3)  # it has read group 1
    shares = {process: Share(4, 1e7, late=process == 2, lacks=lacks if process == 2 else ()) for process in range(4)}
    assert course.late_for(shares) == {0: {2}, 2: {2}, 3: {2}}
    added = course.take_over(shares)
    assert added
    assert [number for number in course.order if number >= len(make_course("spread").plan.groups)] == course.order[
        4 : 4 + len(added)
    ]
    for place in (0, 2, 3):
        assert 2 not in readers_of(course.group(place))
    assert 2 in readers_of(course.group(1))
    assert course.take_over({process: Share(4, 1e7, late=process == 2) for process in range(4)}) == []  # it has come


@pytest.mark.parametrize("strategy", ["spread", "single"])
def test_what_would_travel_without_a_process_can_be_compiled_before(strategy: str) -> None:
    course = make_course(strategy)
    imagined = if_late(course, [MESH])
    assert course.plan == make_course(strategy).plan
    front = course.order[course.ends.front]
    last = course.order[min(course.ends.front + 16, course.ends.back) - 1]
    lacks = tuple(range(front, last + 1))
    shares = {process: Share(last + 1, late=process == 3, lacks=lacks if process == 3 else ()) for process in range(4)}
    added = course.take_over(shares)
    assert added is not None
    assert list(imagined.groups) == [course.plan.groups[number] for number in (front, *added)]


def test_who_is_very_slow_leaves_what_it_has_not_begun() -> None:
    course = make_course("spread")
    planned = len(course.plan.groups)

    def shares(rate: float) -> dict[int, Share]:
        return {p: Share(4, rate if p == 1 else 1e8, long=True, begun=3 if p == 1 else 4) for p in range(4)}

    assert course.leave_slow(shares(0.5e8)) == []  # it is dealt less of later groups
    added = course.leave_slow(shares(1e6))
    assert added
    course.deal(shares(1e6))
    readers = [1 in readers_of(course.group(place)) for place in range(4)]
    assert readers == [True, True, True, False]
    assert all(number >= planned for number in course.order[4 : 4 + len(added)])
    assert course.leave_slow(shares(1e6)) == []  # once


def test_what_fills_holes_is_gathered_where_that_moves_less() -> None:
    course = make_course("spread")
    course.deal({process: Share(1, 1e5 if process == 3 else 1e8, long=True) for process in range(4)})
    filled = [bundle for group in course.plan.groups for bundle in group.bundles if isinstance(bundle, LeafBatch)]
    assert filled
    for bundle in filled:
        assert bundle.shares[3] is None
        assert len(bundle.leaves) == 3
    assert course.catching_up  # the boundary would part holes from what fills them


def test_what_fills_earlier_holes_is_kept_when_groups_are_dealt_once_more() -> None:
    course, arriving = make_course("spread"), Arriving(MESH)
    meetings = 0
    while course.groups_left:
        rate = (1e8, 1e5)[meetings // 2 % 2]
        course.deal({p: Share(course.ends.front + 1, rate if p == 3 else 1e8, long=True) for p in range(4)})
        arriving.exchange(course.group(course.ends.front), course.plan.leaves)
        course.next()
        meetings += 1
    assert set(arriving.blocks) == set(range(len(LEAVES)))
    assert all(block.all() for block in arriving.blocks.values())


def readers_of(group: Group) -> set[int]:
    """Returns the replicas that read something of a group."""
    sizes = {axis: MESH.sizes[axis] for axis in group.axes}
    blocks = [leaf.block_bytes for leaf in LEAVES]
    replicas = range(math.prod(sizes.values()))
    return {r for r in replicas if any(bundle.read_bytes(blocks, len(replicas))[r] for bundle in group.bundles)}


def test_another_replica_is_compared_with_the_only_reader_and_replaces_it() -> None:
    course = make_course("single")
    last = len(course.plan.groups) - 1

    def deal(*rates: float | None) -> None:
        course.deal({process: Share(1, rate, long=True) for process, rate in enumerate(rates)})

    deal(None, None, None, None)
    assert course.as_read_by_another(last) is None  # nothing is known
    course.deal({process: Share(1, 1e6 if process == 0 else None) for process in range(4)})
    assert course.as_read_by_another(last) is None  # it has read for a moment only
    deal(1e6, None, None, None)
    other = course.as_read_by_another(last)
    assert other is not None
    assert {bundle.reader for bundle in other.bundles} == {1}
    assert other.leaves == course.plan.groups[last].leaves
    assert {bundle.reader for bundle in course.plan.groups[last].bundles} == {0}
    deal(1e6, 1.2e6, None, None)
    assert course.as_read_by_another(last) is None
    assert {bundle.reader for bundle in course.plan.groups[last].bundles} == {0}
    deal(1e6, 1e7, None, None)
    assert {bundle.reader for bundle in course.plan.groups[last].bundles} == {1}


def test_nothing_is_dealt_again_before_somebody_has_read_for_long() -> None:
    course = make_course("spread")
    planned = course.plan.groups
    course.deal({process: Share(1, 1e7 if process == 2 else 1e8) for process in range(4)})
    assert course.plan.groups is planned
    course.deal({process: Share(1, 1e7 if process == 2 else 1e8, long=process == 2) for process in range(4)})
    assert course.plan.groups != planned


def test_nobody_is_compared_where_all_replicas_read() -> None:
    course = make_course("spread")
    course.deal({process: Share(1, 1e6 if process == 0 else None) for process in range(4)})
    assert course.as_read_by_another(0) is None


def test_what_was_read_directly_travels_for_a_process_that_lacks_it() -> None:
    course = make_course("spread")
    back = course.move_boundary(1)
    assert back == [*range(len(course.plan.groups) - 1, 0, -1)]
    course.next()
    assert not course.groups_left
    lacking = {process: Share(1, 1e6, late=process == 2, lacks=(1, 2) if process == 2 else ()) for process in range(4)}
    added = course.take_over_direct(lacking)
    assert added is not None
    assert sorted(course.order[course.ends.front : course.ends.back]) == sorted(added)
    taken = {leaf for number in added for leaf in course.plan.groups[number].leaves}
    assert taken == {leaf for number in (1, 2) for leaf in course.plan.groups[number].leaves}
    assert course.take_over_direct({0: Share(1, late=True, lacks=(3,)), **{p: Share(1) for p in (1, 2, 3)}}) is not None


def test_nobody_takes_over_what_all_lack() -> None:
    course = make_course("spread")
    shares = {process: Share(1, late=True) for process in range(4)}
    assert course.take_over(shares) is None
    assert course.plan == make_course("spread").plan


@pytest.mark.parametrize("strategy", ["spread", "single"])
@pytest.mark.parametrize("late", [(0, 3), (1, 2)], ids=str)
def test_every_block_is_read_where_each_replica_has_a_process_that_can_not(
    strategy: str, late: tuple[int, ...]
) -> None:
    course = make_course(strategy, WIDE)
    group = course.group(0)
    assert group.axes == ("dp",)
    shares = {process: Share(1, 0.0 if process in late else 1e6, late=process in late) for process in range(4)}
    added = course.take_over(shares)
    assert added is not None
    (number,) = added
    assert readers_by_column(course.plan.groups[number], WIDE) == [{0, 2} - {*late}] * 2 + [{1, 3} - {*late}] * 2
    # And so are the groups that follow.
    course.next()
    assert course.deal({process: Share(1, 0.0 if process in late else 1e6, long=True) for process in range(4)})
    last = course.plan.groups[len(make_course(strategy, WIDE).plan.groups) - 1]
    if last.axes == ("dp",):
        assert not set().union(*readers_by_column(last, WIDE)) & {*late}


@pytest.mark.parametrize("late", [(0, 2), (1, 3), (0, 1, 2)], ids=str)
def test_nobody_takes_over_blocks_that_only_late_processes_hold(late: tuple[int, ...]) -> None:
    course = make_course("spread", WIDE)
    assert course.take_over({process: Share(1, late=process in late) for process in range(4)}) is None
    course.move_boundary(0)
    lacking = {process: Share(1, late=True, lacks=(0,)) if process in late else Share(1) for process in range(4)}
    assert course.take_over_direct(lacking) is None
    assert course.take_over_direct({**lacking, 2: Share(1), 3: Share(1)}) is not None


def test_who_reads_a_column_may_be_late_too() -> None:
    course = make_course("spread", WIDE)
    failed = {"error": "OSError"}
    assert course.take_over({process: Share(1, failed=failed if process in (0, 3) else None) for process in range(4)})
    while course.order[course.ends.front] != len(course.plan.groups) - 1:
        course.next()
    shares = {process: Share(1, late=process == 2) for process in range(4)}
    assert course.take_over(shares, tried=(0, 3)) is None  # 0 and 2 hold the same
    added = course.take_over(shares, tried=(3,))
    assert added is not None
    assert readers_by_column(course.plan.groups[added[0]], WIDE) == [{0}] * 2 + [{1}] * 2
