"""What a process reads first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Group, Leaf, MeshInfo
from orbax_ext.plan.boundary import GroupBytes
from orbax_ext.plan.course import Course, Share
from orbax_ext.plan.planner import make_plan
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.held_blocks import HeldBlocks
from orbax_ext.transfer.rates import LinkRates
from orbax_ext.transfer.reads import Reads

pytestmark = pytest.mark.once

MIB = 1 << 20


class Storage:
    """Stands in for an executor: notes what begins to be read, until the test says that it is read."""

    def __init__(self) -> None:
        self.shares: list[asyncio.Future[list[Any]]] = []
        self.back: list[asyncio.Future[dict[int, Any]]] = []
        self.direct: list[asyncio.Future[None]] = []
        self.empty: set[Group] = set()  # of which others read the share of this process

    async def read(self, group: Group, held: object) -> list[Any]:
        self.shares.append(asyncio.get_running_loop().create_future())
        return await self.shares[-1]

    async def read_whole(self, group: Group, all_read: Callable[[], None], held: object) -> dict[int, Any]:
        self.back.append(asyncio.get_running_loop().create_future())
        arrays = await self.back[-1]
        all_read()
        return arrays

    async def read_direct(
        self,
        leaves: Sequence[int],
        held: object,
        turn: Callable[[Sequence[int]], contextlib.AbstractAsyncContextManager[None]],
    ) -> dict[int, Any]:
        for leaf in leaves:
            async with turn([leaf]):
                self.direct.append(asyncio.get_running_loop().create_future())
                await self.direct[-1]
        return {}

    def share_bytes(self, group: Group) -> int:
        return int(group not in self.empty)

    def whole_bytes(self, leaves: Sequence[int]) -> int:
        return 7


GROUP = GroupBytes(share=10, direct=40, link=30)


def make_reads(
    storage: Storage,
    replicas: int,
    *,
    boundary_moves: bool = True,
    never: int = 0,
    room: int = 0,
    rates: LinkRates | None = None,
) -> tuple[Reads, Course]:
    """Returns the reads of eight groups, and of so many leaves that never travel."""
    mesh = MeshInfo(("dp", "tp"), (replicas, 2), tuple(number // 2 for number in range(2 * replicas)))
    leaves = [
        Leaf(f"{n}", (1024, 512), "float32", 4, (512, 512), 0, (("tp",), ()), (32, 512), divisible=True)
        for n in range(8)
    ]
    leaves += [Leaf(f"never {n}", (64, 64), "float32", 4, (8, 64), 0, (("dp", "tp"), ())) for n in range(never)]
    plan = make_plan(leaves, [mesh], Options(), processes=replicas, group_bytes=MIB)
    course = Course(plan, [mesh])
    reads = Reads(
        cast(Executor, storage),
        course,
        Recorder(),
        rates or LinkRates([GROUP] * 8),
        boundary_moves=boundary_moves,
        room=room,
        reason=lambda number: "",
        held=HeldBlocks(None, ()),
        arrived=lambda arrays: None,
    )
    assert len(plan.groups) == 8
    return reads, course


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def read_shares(storage: Storage) -> None:
    """Lets shares arrive until none is being read."""
    while waiting := [share for share in storage.shares if not share.done()]:
        waiting[0].set_result([])
        await settle()


def run(case: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(case(), 10))


def test_no_group_from_the_back_begins_while_there_are_shares_to_read() -> None:
    async def case() -> None:
        storage = Storage()
        reads, course = make_reads(storage, replicas=4)
        reads.begin()
        await settle()
        await read_shares(storage)
        reads.back.begin(course.move_boundary(5))
        await settle()
        assert (len(storage.shares), len(storage.back)) == (3, 2)
        course.next()  # an exchange begins: one more share may be read
        reads.begin()
        storage.back[0].set_result({})
        await settle()
        assert (len(storage.shares), len(storage.back)) == (4, 2)
        await read_shares(storage)
        assert len(storage.back) == 3
        reads.give_up()

    run(case)


@pytest.mark.parametrize(
    ("replicas", "moves", "shares"),
    [(2, True, [2, 3, 5]), (4, True, [3, 4, 5]), (2, False, [3, 4, 5])],
    ids=["two replicas", "four replicas", "all is exchanged"],
)
def test_no_more_than_one_group_is_read_in_shares_before_an_exchange_has_ended(
    replicas: int, moves: bool, shares: list[int]
) -> None:
    async def case() -> None:
        storage = Storage()
        reads, course = make_reads(storage, replicas, boundary_moves=moves)
        counts = []
        for _ in range(3):
            reads.begin()
            await settle()
            await read_shares(storage)
            counts.append(len(storage.shares))
            course.next()  # the exchange before it has ended
        assert counts == shares
        reads.give_up()

    run(case)


@pytest.mark.parametrize("moves", [True, False], ids=["auto", "all is exchanged"])
def test_leaves_that_never_travel_are_read_whenever_there_are_no_shares_to_read(moves: bool) -> None:
    async def case() -> None:
        storage = Storage()
        reads, course = make_reads(storage, replicas=4, boundary_moves=moves, never=2)
        reads.begin()
        await settle()
        assert (len(storage.shares), len(storage.direct)) == (1, 0)
        await read_shares(storage)
        assert (len(storage.shares), len(storage.direct)) == (3, 1)
        assert reads.shares.idle
        assert [reads.idle] == [False]  # so the boundary does not move yet
        course.next()  # an exchange begins: one more share may be read
        reads.begin()
        await settle()
        storage.direct[0].set_result(None)
        await settle()
        assert (len(storage.shares), len(storage.direct)) == (4, 1)
        await read_shares(storage)
        assert len(storage.direct) == 2
        storage.direct[1].set_result(None)
        await reads.everything_read(None, strict=False)
        assert [reads.idle] == [True]
        reads.give_up()

    run(case)


@pytest.mark.parametrize("moves", [True, False], ids=["auto", "all is exchanged"])
def test_shares_are_read_as_far_as_there_is_room_while_others_are_late(moves: bool) -> None:
    async def case() -> None:
        storage = Storage()
        room = 5  # groups, of which a replica reads a fourth
        reads, course = make_reads(storage, replicas=4, boundary_moves=moves, room=room * MIB // 4)
        reads.begin()
        await settle()
        await read_shares(storage)
        reads.further.wanted = True
        reads.begin()
        await settle()
        await read_shares(storage)
        # In auto nobody knows before an exchange has ended whether shares are needed.
        assert (len(storage.shares), reads.upto) == ((3, 3) if moves else (min(8, room), min(8, room)))
        course.next()
        course.next()
        assert reads.upto == min(8, 2 + room)  # it tells the others before it does so
        reads.begin()
        await settle()
        await read_shares(storage)
        assert len(storage.shares) == reads.upto
        reads.shares.give_up(4)  # the boundary has moved there
        assert reads.unused(0) == 4
        reads.give_up()

    run(case)


def test_a_process_that_is_late_goes_on_where_the_others_are() -> None:
    async def case() -> None:
        storage = Storage()
        reads, course = make_reads(storage, replicas=4, boundary_moves=False)
        reads.begin()
        await settle()
        storage.shares[0].set_result(["first"])
        await settle()
        reads.begin()
        await asyncio.sleep(0.01)  # two at a time from now on
        await settle()
        course.next()
        late = list(range(1, reads.upto))
        assert reads.further.lacking(reads.upto) == tuple(late)
        stalled = storage.shares[1:]
        storage.empty = {course.group(place) for place in late}
        reads.further.leave_to_others()
        await settle()
        assert reads.shares.stuck
        assert reads.share.done()
        assert reads.shares.take(1) is None  # others read it
        assert [share.cancelled() for share in stalled] == [False] + [True] * (len(stalled) - 1)  # the first one shows
        reads.give_up()

    run(case)


def test_a_leaf_that_never_travels_and_cannot_be_read_is_told_at_once() -> None:
    async def case() -> None:
        storage = Storage()
        reads, _ = make_reads(storage, replicas=4, never=1)
        reads.begin()
        await settle()
        await read_shares(storage)
        storage.direct[0].set_exception(OSError("no such disk"))
        with pytest.raises(OSError, match="no such disk"):
            await reads.everything_read(None, strict=False)
        reads.give_up()

    run(case)


def test_all_that_is_read_counts_for_the_rate() -> None:
    async def case() -> None:
        storage, rates = Storage(), LinkRates([GROUP] * 8)
        reads, course = make_reads(storage, replicas=4, never=1, rates=rates)
        reads.begin()
        await settle()
        await read_shares(storage)
        assert rates.bytes_read == 3 * 10
        assert reads.unused(0) == 3
        storage.direct[0].set_result(None)
        await settle()
        assert rates.bytes_read == 3 * 10 + 7
        reads.back.begin(course.move_boundary(7))
        await settle()
        storage.back[0].set_result({})
        await settle()
        assert rates.bytes_read == 3 * 10 + 7 + 40
        reads.give_up()

    run(case)


def test_a_share_counts_for_the_rate_as_far_as_it_is_read_after_groups_were_dealt_again() -> None:
    async def case() -> None:
        storage, rates = Storage(), LinkRates([GROUP] * 8)
        reads, course = make_reads(storage, replicas=4, rates=rates)
        course.deal({process: Share(0, 1e6 if process else 1e5, long=True) for process in range(4)})
        dealt, planned = course.group(1), course.as_planned(1)
        assert dealt != planned
        sizes = {planned: 100, dealt: 20}
        storage.share_bytes = lambda group: sizes.get(group, 100)  # type: ignore[method-assign]
        reads.begin()
        await settle()
        await read_shares(storage)
        assert rates.bytes_read == 10 + 2 + 10
        reads.give_up()

    run(case)


def test_who_is_waited_for_alone_comes_when_another_one_has_come() -> None:
    async def case() -> None:
        storage = Storage()
        reads, _ = make_reads(storage, replicas=4)
        reads.begin()
        waiting = asyncio.ensure_future(reads.first_of(asyncio.sleep(9), alone=2))
        await settle()
        reads.ask(2)
        await settle()
        assert not waiting.done()
        reads.ask(1)
        await settle()
        assert waiting.done()
        reads.give_up()

    run(case)
