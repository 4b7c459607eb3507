"""Reading ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orbax_ext.transfer.rates import Stopwatch
from orbax_ext.transfer.read_ahead import BackReads, ReadAhead, both

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

    async def is_asked_for(self, count: int) -> None:
        while len(self.asked) < count:  # the test has a limit
            await asyncio.sleep(0.01)


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
        reading = ReadAhead(storage.read, 1, Stopwatch())
        reading.begin(2, 4)
        await settle()
        assert storage.asked == [0]
        assert not reading.task(0).done()
        await storage.arrive(0)
        assert reading.take(0) == 0
        assert storage.asked == [0, 1]
        assert [reading.idle] == [False]
        await storage.arrive(1)
        assert storage.asked == [0, 1]
        assert [reading.idle] == [True]  # until more may be read
        reading.begin(9, 4)
        assert [reading.idle] == [False]
        for number in (2, 3):
            await settle()
            await storage.arrive(number)
        assert [reading.take(number) for number in (1, 2, 3)] == [10, 20, 30]
        assert storage.asked == [0, 1, 2, 3]  # no more than there are, and none twice
        assert (reading.begun, reading.groups_done) == (4, [0, 1, 2, 3])

    run(case)


def test_two_groups_are_read_at_a_time_half_a_group_apart() -> None:
    async def case() -> None:
        storage = Storage()
        reading = ReadAhead(storage.read, 9, Stopwatch())
        reading.begin(9, 9)
        await asyncio.sleep(0.2)
        assert storage.asked == [0]  # if the next one were begun, too, the first would come late
        await storage.arrive(0)
        assert storage.asked == [0, 1]  # storage is not idle
        await storage.is_asked_for(3)
        assert storage.asked == [0, 1, 2]
        await storage.arrive(1)
        assert storage.asked == [0, 1, 2, 3]
        reading.give_up(0)

    run(case)


def test_groups_that_are_given_up_are_not_waited_for() -> None:
    async def case() -> None:
        storage = Storage()
        reading = ReadAhead(storage.read, 2, Stopwatch())
        reading.begin(3, 3)
        await settle()
        await storage.arrive(0)
        await storage.is_asked_for(3)
        assert storage.asked == [0, 1, 2]
        reading.give_up(1)
        await settle()
        assert [storage.there[number].cancelled() for number in range(3)] == [False, True, True]
        assert reading.idle
        assert reading.take(0) == 0

    run(case)


def test_a_failed_read_is_raised_before_it_is_taken() -> None:
    async def case() -> None:
        storage = Storage()
        reading = ReadAhead(storage.read, 2, Stopwatch())
        reading.begin(2, 2)
        await settle()
        reading.raise_errors()
        storage.there[0].set_exception(OSError("no such disk"))
        await settle()
        with pytest.raises(OSError, match="no such disk"):
            reading.raise_errors()
        reading.give_up(0)

    run(case)


def test_groups_from_the_back_are_read_two_at_a_time() -> None:
    async def case() -> None:
        storage, watch = Storage(), Stopwatch()

        async def read(number: int) -> dict[int, int]:
            return {number: await storage.read(number)}

        back = BackReads(read, ReadAhead(storage.read, 0, watch).until_idle, watch)
        assert back.idle
        back.begin([7, 6])
        back.begin([5])
        await settle()
        assert storage.asked == [7, 6]
        await storage.arrive(6)
        assert storage.asked == [7, 6, 5]
        assert (back.done, back.idle) == (1, False)
        await storage.arrive(5)
        await storage.arrive(7)
        assert (back.done, back.idle) == (3, True)
        assert back.arrays() == {7: 70, 6: 60, 5: 50}

    run(case)


def test_groups_from_the_back_wait_for_shares_that_are_read_or_wait() -> None:
    async def case() -> None:
        shares, back_storage = Storage(), Storage()

        async def read(number: int) -> dict[int, int]:
            return {number: await back_storage.read(number)}

        reading = ReadAhead(shares.read, 2, Stopwatch())
        back = BackReads(read, reading.until_idle, Stopwatch())
        reading.begin(1, 9)
        back.begin([7, 6, 5, 4])
        await settle()
        assert back_storage.asked == []
        await shares.arrive(0)
        assert back_storage.asked == [7, 6]
        reading.begin(3, 9)
        await back_storage.arrive(7)  # one that has begun goes on
        assert (back_storage.asked, back.idle) == ([7, 6], False)
        await shares.arrive(1)
        assert (shares.asked, back_storage.asked) == ([0, 1, 2], [7, 6])
        await shares.arrive(2)
        assert back_storage.asked == [7, 6, 5]
        await back_storage.arrive(6)
        assert back_storage.asked == [7, 6, 5, 4]
        back.give_up()

    run(case)


@pytest.mark.parametrize("over", ["given up", "left to others"])
def test_groups_from_the_back_do_not_wait_for_shares_that_are(over: str) -> None:
    async def case() -> None:
        shares, back_storage = Storage(), Storage()

        async def read(number: int) -> dict[int, int]:
            return {number: await back_storage.read(number)}

        reading = ReadAhead(shares.read, 2, Stopwatch())
        back = BackReads(read, reading.until_idle, Stopwatch())
        reading.begin(1, 9)
        back.begin([7])
        await settle()
        if over == "given up":
            reading.give_up(0)
        else:
            hangs = reading.replace(0, -1)
            assert not hangs.done()
        await settle()
        assert back_storage.asked == [7]
        back.give_up()

    run(case)


def test_a_group_that_is_being_put_together_is_not_dropped() -> None:
    async def case() -> None:
        storage, watch = Storage(), Stopwatch()
        release = asyncio.Event()

        async def read(number: int) -> dict[int, int]:
            value = await storage.read(number)
            back.note_handed_over(number)
            await release.wait()  # as for a thread, which goes on when the task is cancelled
            return {number: value}

        back = BackReads(read, ReadAhead(storage.read, 0, watch).until_idle, watch)
        back.begin([7, 6])
        await settle()
        await storage.arrive(7)
        assert (back.unread, back.lacking, len(back.handed_over)) == ((6,), (6,), 1)
        back.drop([7, 6])
        assert (len(back.under_way), back.leaves) == (1, frozenset())
        release.set()
        await settle()
        assert (back.arrays(), back.leaves, back.idle) == ({7: 70}, frozenset({7}), True)

    run(case)


def test_a_group_is_read_when_storage_is_done_with_it_though_an_exchange_delays_its_hand_over() -> None:
    async def case() -> None:
        storage, watch = Storage(), Stopwatch()
        release = asyncio.Event()

        async def read(number: int) -> dict[int, int]:
            value = await storage.read(number)
            back.note_handed_over(number)
            await release.wait()
            return {number: value}

        back = BackReads(read, ReadAhead(storage.read, 0, watch).until_idle, watch)
        back.begin([7])
        await settle()
        (end,) = back.ends
        await storage.arrive(7)
        assert (back.done, back.idle, back.ends, end.done()) == (1, True, [], True)
        seconds = watch.seconds
        await asyncio.sleep(0.01)
        assert watch.seconds == seconds  # storage has nothing to do
        assert back.under_way
        release.set()
        await settle()
        assert (back.done, back.arrays()) == (1, {7: 70})

    run(case)


def test_reading_ends_also_where_it_fails_or_is_given_up() -> None:
    async def case() -> None:
        storage, watch = Storage(), Stopwatch()

        async def read(number: int) -> dict[int, int]:
            return {number: await storage.read(number)}

        back = BackReads(read, ReadAhead(storage.read, 0, watch).until_idle, watch)
        back.begin([7, 6])
        await settle()
        storage.there[7].set_exception(OSError("no such disk"))
        back.drop([6])
        await settle()
        assert (back.ends, back.done, [*back.failed]) == ([], 0, [7])

    run(case)


def test_nobody_takes_over_a_group_that_could_not_be_put_together() -> None:
    async def case() -> None:
        storage, watch = Storage(), Stopwatch()

        async def read(number: int) -> dict[int, int]:
            await storage.read(number)
            back.note_handed_over(number)
            raise MemoryError("no room")

        back = BackReads(read, ReadAhead(storage.read, 0, watch).until_idle, watch)
        back.begin([7])
        await settle()
        await storage.arrive(7)
        assert (back.lacking, back.failed) == ((), {})
        (task,) = back.handed_over
        assert isinstance(task.exception(), MemoryError)

    run(case)


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
