from __future__ import annotations

import asyncio
import threading
import time

import pytest

from orbax_ext import errors
from orbax_ext.meeting.session import Limits
from orbax_ext.storage import counters, stall

pytestmark = pytest.mark.once


async def never() -> None:
    await asyncio.Event().wait()


async def soon(result: str) -> str:
    await asyncio.sleep(0.01)
    return result


def test_the_result_of_work_is_returned() -> None:
    assert asyncio.run(stall.while_storage_answers(soon("done"), 5)) == "done"


def test_storage_that_does_not_answer_ends_the_work() -> None:
    with pytest.raises(TimeoutError, match=r"storage has not answered for 0\.1 s"):
        asyncio.run(stall.while_storage_answers(never(), 0.1))


def test_requests_prolong_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "requests", iter(range(10**6)).__next__)

    async def work() -> str:
        await asyncio.sleep(0.5)
        return "done"

    assert asyncio.run(stall.while_storage_answers(work(), 0.1)) == "done"


def test_a_call_that_reads_ends_unless_requests_are_made() -> None:
    stop = threading.Event()
    assert stall.while_answered(lambda: "done", lambda: 0, 5) == "done"
    with pytest.raises(TimeoutError, match=r"storage has not answered for 0\.1 s"):
        stall.while_answered(lambda: stop.wait(60), lambda: 0, 0.1)
    stop.set()

    def work() -> str:
        time.sleep(0.7)
        return "done"

    assert stall.while_answered(work, iter(range(10**6)).__next__, 0.1) == "done"


def test_a_wait_whose_loop_was_closed_ends_without_an_error() -> None:
    """Orbax closes its loop under a restore when another handler fails; the coroutine is destroyed some time later."""
    loop = asyncio.new_event_loop()
    waiting = stall.while_storage_answers(never(), 60)
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    waiting.close()
    assert not task.cancelled()


def test_bytes_prolong_the_wait_for_them_and_requests_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "requests", iter(range(10**6)).__next__)
    with pytest.raises(errors.RestoreTimeoutError, match=r"process 3 has read nothing for 0\.1 s .* in phase 'read'"):
        asyncio.run(stall.while_bytes_arrive(never(), Limits(0.1), 3, "read"))
    monkeypatch.setattr(counters, "bytes_read", iter(range(10**6)).__next__)

    async def work() -> str:
        await asyncio.sleep(0.5)
        return "done"

    assert asyncio.run(stall.while_bytes_arrive(work(), Limits(0.1), 3, "read")) == "done"


def test_bytes_do_not_prolong_the_wait_beyond_the_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "bytes_read", iter(range(10**6)).__next__)
    late = r"process 3 has not read all within 0\.2 s \(timeout\), in phase 'read'"
    with pytest.raises(errors.RestoreTimeoutError, match=late):
        asyncio.run(stall.while_bytes_arrive(never(), Limits(60, total=0.2), 3, "read"))
