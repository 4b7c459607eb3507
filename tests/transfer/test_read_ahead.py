"""Reading ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orbax_ext.transfer.read_ahead import ReadAhead, Stopwatch, both

pytestmark = pytest.mark.once


class Storage:
    """Groups that have been read when the test says so."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.there: dict[int, asyncio.Future[int]] = {}

    def read(self, number: int) -> asyncio.Future[int]:
        self.asked.append(number)
        self.there[number] = asyncio.get_running_loop().create_future()
        return self.there[number]

    async def arrive(self, number: int) -> None:
        self.there[number].set_result(10 * number)
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 10)

    asyncio.run(limited())


def test_groups_are_read_once_and_in_order_however_they_are_asked_for() -> None:
    async def case() -> None:
        storage = Storage()
        reading = ReadAhead(storage.read, ahead=1)
        reading.begin(1, 4)
        taken = asyncio.ensure_future(reading.take(0, 4))
        await settle()
        assert storage.asked == [0]
        await storage.arrive(0)
        assert await taken == 0
        assert storage.asked == [0, 1]  # the one that was wanted and one more
        await storage.arrive(1)
        assert storage.asked == [0, 1]
        reading.begin(9, 4)
        for number in (2, 3):
            await settle()
            await storage.arrive(number)
        assert [await reading.take(number, 4) for number in (1, 2, 3)] == [10, 20, 30]
        assert storage.asked == [0, 1, 2, 3]  # no more than there are, and none twice
        assert reading.begun == 4

    run(case)


def test_two_groups_are_read_at_a_time_half_a_group_apart() -> None:
    async def case() -> None:
        storage = Storage()
        reading = ReadAhead(storage.read, ahead=9)
        reading.begin(9, 9)
        await asyncio.sleep(0.2)
        assert storage.asked == [0]  # if the next one were begun, too, the first would come late
        await storage.arrive(0)
        assert storage.asked == [0, 1]  # storage is not idle
        await asyncio.sleep(0.2)
        assert storage.asked == [0, 1, 2]
        await storage.arrive(1)
        assert storage.asked == [0, 1, 2, 3]
        reading.give_up(0)

    run(case)


def test_groups_that_are_given_up_are_not_waited_for() -> None:
    async def case() -> None:
        storage = Storage()
        reading = ReadAhead(storage.read, ahead=2)
        reading.begin(3, 3)
        await settle()
        await storage.arrive(0)
        await asyncio.sleep(0.1)
        assert storage.asked == [0, 1, 2]
        reading.give_up(1)
        await settle()
        assert [storage.there[number].cancelled() for number in range(3)] == [False, True, True]
        assert await reading.take(0, 1) == 0
        reading.begin(2, 2)  # there is another group with that number now
        await settle()
        assert storage.asked == [0, 1, 2, 1]
        reading.give_up(0)

    run(case)


def test_a_stopwatch_runs_while_anything_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("orbax_ext.transfer.read_ahead.time.monotonic", lambda: now[0])
    watch = Stopwatch()
    with watch:
        now[0] = 1.0
        with watch:
            now[0] = 3.0
        now[0] = 4.0
        assert watch.seconds == 4.0
    now[0] = 10.0
    assert watch.seconds == 4.0
    with watch:
        now[0] = 11.0
    assert watch.seconds == 5.0


def test_both_are_waited_for_also_when_one_fails() -> None:
    async def case() -> None:
        over = []

        async def fail() -> None:
            raise ValueError("no")

        async def work() -> None:
            await settle()
            over.append(True)

        with pytest.raises(ValueError, match="no"):
            await both(fail(), work())
        assert over == [True]

    run(case)
