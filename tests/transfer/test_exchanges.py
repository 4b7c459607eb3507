"""One exchange travels at a time, and the next one may be agreed on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from orbax_ext.plan import Group
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.exchanges import AgreedExchange, Exchanges
from orbax_ext.transfer.rates import LinkRates

pytestmark = pytest.mark.once


class Fabric:
    """Exchanges that arrive when the test says so."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.took_part: list[int] = []
        self.more_reads = 0
        self._there: dict[int, asyncio.Future[dict[int, Any]]] = {}
        self.exchanges = Exchanges(
            cast(Any, self), Recorder(), LinkRates([]), begun=self.begun, arrived=lambda arrays: None
        )

    def begun(self) -> None:
        self.more_reads += 1

    def agree(
        self, number: int, meet_after: float | None = 0.0, already: Callable[[], frozenset[int]] = frozenset
    ) -> None:
        self.exchanges.start(AgreedExchange(Group(number, (), (), 0), number, None, meet_after, already))

    def start_exchange(self, group: Group, contributions: None) -> asyncio.Future[dict[int, Any]]:
        number = group.mesh  # stands for the number of the group here
        self.started.append(number)
        self._there[number] = asyncio.get_running_loop().create_future()
        return self._there[number]

    def take_part(self, group: Group) -> None:
        self.took_part.append(group.mesh)

    async def arrive(self, number: int) -> None:
        self._there[number].set_result({number: f"leaf {number}"})
        await settle()

    async def fail(self, number: int) -> None:
        self._there[number].set_exception(MemoryError("no room"))
        await settle()

    def may_meet(self) -> bool:
        return all(task.done() for task in self.exchanges.before_meeting)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run(test: Callable[[Fabric], Awaitable[None]]) -> Fabric:
    async def limited() -> Fabric:
        fabric = Fabric()
        await asyncio.wait_for(test(fabric), 10)
        fabric.exchanges.give_up()
        return fabric

    return asyncio.run(limited())


def test_the_next_exchange_waits_for_the_end_of_the_one_before() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0)
        await settle()
        assert fabric.may_meet()
        fabric.agree(1)
        await settle()
        assert fabric.started == [0]
        assert fabric.exchanges.waiting == 1
        assert not fabric.may_meet()  # a third one would be one too many
        await fabric.arrive(0)
        assert fabric.started == [0, 1]
        assert (fabric.exchanges.waiting, fabric.more_reads) == (0, 1)
        assert fabric.may_meet()
        await fabric.arrive(1)
        assert fabric.exchanges.under_way == []
        assert fabric.exchanges.arrays == {0: "leaf 0", 1: "leaf 1"}

    assert run(case).took_part == []


def test_all_can_wait_for_the_end_before_they_meet() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0, None)
        await settle()
        assert not fabric.may_meet()
        await fabric.arrive(0)
        assert fabric.may_meet()

    run(case)


def test_all_can_wait_for_some_time_before_they_meet() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0, 0.01)
        await settle()
        await asyncio.wait(fabric.exchanges.before_meeting)
        assert fabric.may_meet()
        assert len(fabric.exchanges.under_way) == 1

    run(case)


def test_after_a_failure_it_takes_part_in_what_was_agreed_on_and_tells_the_error() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0)
        await settle()
        fabric.agree(1)
        await fabric.fail(0)
        assert fabric.started == [0, 1]  # the others are inside
        (before,) = fabric.exchanges.before_meeting
        assert isinstance(before.exception(), MemoryError)

    run(case)


@pytest.mark.parametrize("meet_after", [None, 0.0, 100.0])
def test_a_failure_of_the_last_exchange_is_found_at_the_end(meet_after: float | None) -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0, meet_after)
        await settle()
        await fabric.fail(0)
        assert fabric.may_meet()
        (failed,) = fabric.exchanges.under_way
        assert isinstance(failed.exception(), MemoryError)

    run(case)


def test_a_restore_that_is_given_up_takes_part_in_what_was_agreed_on() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0)
        await settle()
        fabric.agree(1)
        await settle()

    fabric = run(case)
    assert fabric.started == [0]
    assert fabric.took_part == [1]


def test_a_restore_that_is_given_up_at_once_has_begun_what_was_agreed_on() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0)
        fabric.exchanges.give_up()
        await settle()

    fabric = run(case)
    assert fabric.started == [0]
    assert fabric.took_part == []


def test_what_this_process_has_read_directly_is_not_kept_twice() -> None:
    async def case(fabric: Fabric) -> None:
        fabric.agree(0, already=lambda: frozenset({0}))
        await settle()
        await fabric.arrive(0)
        fabric.agree(1, already=lambda: frozenset({0}))
        await settle()
        await fabric.arrive(1)
        assert fabric.exchanges.arrays == {1: "leaf 1"}

    run(case)
