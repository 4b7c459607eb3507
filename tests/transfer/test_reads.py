"""What a process reads first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Group, Leaf, MeshInfo
from orbax_ext.plan.course import Course
from orbax_ext.plan.planner import make_plan
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.held_blocks import HeldBlocks
from orbax_ext.transfer.rates import Stopwatch
from orbax_ext.transfer.reads import Reads

pytestmark = pytest.mark.once

MIB = 1 << 20


class Storage:
    """Stands in for an executor: notes what begins to be read, until the test says that it is read."""

    def __init__(self) -> None:
        self.shares: list[asyncio.Future[list[Any]]] = []
        self.back: list[asyncio.Future[dict[int, Any]]] = []

    async def read(self, group: Group, held: object) -> list[Any]:
        self.shares.append(asyncio.get_running_loop().create_future())
        return await self.shares[-1]

    async def read_whole(self, group: Group) -> dict[int, Any]:
        self.back.append(asyncio.get_running_loop().create_future())
        return await self.back[-1]

    def share_bytes(self, group: Group) -> int:
        return 1

    def whole_bytes(self, group: Group) -> int:
        return 1


def make_reads(storage: Storage, replicas: int, *, boundary_moves: bool = True) -> tuple[Reads, Course]:
    """Returns the reads of eight groups."""
    mesh = MeshInfo(("dp", "tp"), (replicas, 2), tuple(number // 2 for number in range(2 * replicas)))
    leaves = [
        Leaf(f"{n}", (1024, 512), "float32", 4, (512, 512), 0, (("tp",), ()), (32, 512), divisible=True)
        for n in range(8)
    ]
    plan = make_plan(leaves, [mesh], Options(), processes=replicas, group_bytes=MIB)
    course = Course(plan, [mesh])
    reads = Reads(
        cast(Executor, storage),
        course,
        Recorder(),
        Stopwatch(),
        boundary_moves=boundary_moves,
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
