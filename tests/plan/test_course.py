"""All processes decide the same who reads what, however late, stuck or failing they are, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_ext.plan.course import Share
from orbax_ext.plan.readers import replicas_with
from tests.support.arriving import Arriving
from tests.support.courses import LEAVES, MESH, make_course

pytestmark = pytest.mark.once


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["spread", "single"]), st.data())
def test_everything_arrives_whoever_is_late(strategy: str, data: st.DataObject) -> None:
    courses = [make_course(strategy) for _ in range(2)]  # on two processes
    arriving = Arriving(MESH)
    meetings = 0
    while courses[0].groups_left:
        meetings += 1
        shares = {}
        for process in range(4):
            trouble = data.draw(st.sampled_from(["", "", "", "late", "failed"])) if meetings < 20 else ""
            shares[process] = Share(
                min(courses[0].ends.front + data.draw(st.integers(1, 3)), courses[0].ends.back),
                data.draw(st.sampled_from([None, 0.0, 1e6, 1e7, 1.2e7])),
                late=trouble == "late",
                failed={"error": "OSError"} if trouble == "failed" else None,
            )
        told = [Share.from_json(share.to_json()) for share in shares.values()]
        assert told == [*shares.values()]
        group = courses[0].group(courses[0].ends.front)
        if not all(share.ready for share in shares.values()):
            added = [course.take_over(shares) for course in courses]
            assert added[0] == added[1]
            if added[0] is None:
                assert not any(share.ready for share in shares.values())  # here each process is a replica
                continue
            late = {process for process, share in shares.items() if not share.ready}
            for number in added[0]:
                new = courses[0].plan.groups[number]
                assert not {bundle.reader for bundle in new.bundles} & replicas_with(new, [MESH], late)
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
        assert block.all(), f"{LEAVES[index]} has holes"


def test_a_host_that_recovers_gets_its_shares_back() -> None:
    course = make_course("spread")
    planned = course.plan.groups

    def deal(*rates: float) -> None:
        course.deal({process: Share(1, rate) for process, rate in enumerate(rates)})

    deal(1e8, 1e8, 1e7, 1e8)
    assert course.plan.groups[0] == planned[0]  # it has begun
    assert course.plan.groups[1:] != planned[1:]
    slow = course.plan.groups
    deal(1e8, 1.1e8, 1e7, 1e8)
    assert course.plan.groups is slow  # the same, but for noise
    deal(1e8, 1e8, 1e8, 1e8)
    assert course.plan.groups == planned


def test_another_replica_is_compared_with_the_only_reader_and_replaces_it() -> None:
    course = make_course("single")
    last = len(course.plan.groups) - 1

    def deal(*rates: float | None) -> None:
        course.deal({process: Share(1, rate) for process, rate in enumerate(rates)})

    deal(None, None, None, None)
    assert course.as_read_by_another(last) is None  # nothing is known
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
