"""What storage does not answer is asked for again, and the first answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import tensorstore as ts

from orbax_ext.report.recorder import Recorder
from orbax_ext.storage import counters
from orbax_ext.transfer import again, boxes

pytestmark = pytest.mark.once


class OneRead:
    """A read that ends when the test says so."""

    def __init__(self, footprint: int = 1) -> None:
        self.footprint = footprint
        promise: Any = ts.Promise
        self.first, self.future = promise.new()
        self.second: Any = None
        self.took_second = False

    def begin_again(self) -> Any:
        self.second, future = ts.Promise.new()
        return future

    def take_second(self) -> None:
        self.took_second = True


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_FLOOR", 0.05)
    monkeypatch.setattr(again, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(again, "_LEAST", 1)
    again._paces.clear()


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 10)

    asyncio.run(limited())


def begin(reads: list[OneRead], store: str = "gs://bucket") -> asyncio.Task[list[Any]]:
    return asyncio.ensure_future(again.answers(reads, [read.future for read in reads], boxes._ended, store))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_the_answer_to_the_second_request_counts_if_it_comes_first() -> None:
    async def case() -> None:
        reads = [OneRead() for _ in range(3)]
        task = begin(reads)
        for read in reads[:2]:
            read.first.set_result("first")
        await until(lambda: reads[2].second is not None)
        assert [read.second is None for read in reads] == [True, True, False]
        reads[2].second.set_result("second")
        assert [future.result() for future in await task] == ["first", "first", "second"]
        assert [read.took_second for read in reads] == [False, False, True]
        await asyncio.sleep(0.02)
        assert reads[2].future.cancelled()

    run(case)


def test_the_answer_to_the_first_request_counts_if_it_comes_first() -> None:
    async def case() -> None:
        reads = [OneRead() for _ in range(2)]
        task = begin(reads)
        reads[0].first.set_result("first")
        await until(lambda: reads[1].second is not None)
        reads[1].first.set_result("late")
        assert [future.result() for future in await task] == ["first", "late"]
        assert not reads[1].took_second

    run(case)


@pytest.mark.parametrize("fails_first", ["first", "second"])
def test_one_of_two_requests_may_fail(fails_first: str) -> None:
    async def case() -> None:
        reads = [OneRead() for _ in range(2)]
        task = begin(reads)
        reads[0].first.set_result("first")
        await until(lambda: reads[1].second is not None)
        one, other = (reads[1].first, reads[1].second)
        if fails_first == "second":
            one, other = other, one
        one.set_exception(OSError("gone"))
        await asyncio.sleep(0.03)
        other.set_result("there")
        assert (await task)[1].result() == "there"

    run(case)


def test_large_reads_have_more_time_than_small_ones() -> None:
    async def case() -> None:
        reads = [OneRead(1), OneRead(1000)]
        task = begin(reads)
        await asyncio.sleep(0.02)
        reads[0].first.set_result("small")
        await asyncio.sleep(0.2)
        assert reads[1].second is None  # by the pace of the small one it takes 20 s
        reads[1].first.set_result("large")
        assert [future.result() for future in await task] == ["small", "large"]

    run(case)


def test_tiny_reads_say_nothing_about_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        monkeypatch.setattr(again, "_LEAST", 1 << 20)
        scalar = OneRead(4)
        task = begin([scalar])
        await asyncio.sleep(0.03)
        scalar.first.set_result("there")
        await task
        reads = [OneRead(4), OneRead(1 << 20)]
        task = begin(reads)
        await asyncio.sleep(0.03)
        reads[0].first.set_result("there")
        await until(lambda: reads[1].second is not None)  # by the pace of four bytes that would take days
        reads[1].second.set_result("there")
        await task

    run(case)


def test_nothing_is_asked_for_again_before_anything_was_read() -> None:
    async def case() -> None:
        read = OneRead()
        task = begin([read])
        await asyncio.sleep(0.2)
        assert read.second is None
        read.first.set_result("there")
        await task
        again._paces["gs://bucket"].append(1e-6)  # an earlier read has shown how fast storage is
        late = OneRead()
        task = begin([late])
        await until(lambda: late.second is not None)
        late.second.set_result("there")
        await task

    run(case)


def test_both_requests_are_cancelled_with_the_restore() -> None:
    async def case() -> None:
        reads = [OneRead(), OneRead()]
        task = begin(reads)
        reads[0].first.set_result("there")
        await until(lambda: reads[1].second is not None)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.02)
        assert reads[1].future.cancelled()

    run(case)


def test_a_store_that_is_only_slow_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        arrived = 0

        def bytes_read() -> int:
            nonlocal arrived
            arrived += slow
            return arrived

        monkeypatch.setattr(counters, "bytes_read", bytes_read)
        slow = 1
        reads = [OneRead() for _ in range(3)]
        task = begin(reads)
        reads[0].first.set_result("first")
        await asyncio.sleep(0.2)  # nothing ends any more, but bytes come
        assert [read.second is None for read in reads] == [True] * 3
        slow = 0
        await until(lambda: reads[1].second is not None and reads[2].second is not None)
        for read in reads[1:]:
            read.second.set_result("second")
        await task

    run(case)


def test_reads_of_another_store_say_nothing_about_one() -> None:
    async def case() -> None:
        read = OneRead()
        task = begin([read], "gs://fast")
        read.first.set_result("there")
        await task
        other = OneRead()
        task = begin([other], "s3://slow")
        await asyncio.sleep(0.2)
        assert other.second is None
        other.first.set_result("there")
        await task

    run(case)


def test_few_bytes_are_asked_for_again_at_a_time_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        monkeypatch.setattr(again, "_AT_A_TIME", 10)
        recorder = Recorder()
        reads = [OneRead(1), *[OneRead(4) for _ in range(4)], OneRead(100)]
        task = begin(reads)
        reads[0].first.set_result("first")
        await until(lambda: reads[2].second is not None)
        await asyncio.sleep(0.03)
        assert [read.second is None for read in reads[1:]] == [False, False, True, True, True]
        assert recorder.bytes_again == 8
        reads[3].first.set_result("late")  # and need not be asked for again
        reads[1].second.set_result("second")
        await until(lambda: reads[4].second is not None)
        assert reads[3].second is None
        for read in (reads[2], reads[4]):
            read.second.set_result("second")
        await until(lambda: reads[5].second is not None)
        reads[5].second.set_result("second")
        await task
        assert recorder.bytes_again == 112

    run(case)
