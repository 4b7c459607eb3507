from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest

from orbax_ext.meeting import threads


def test_a_call_that_takes_too_long_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not finish within 0\.1 s"):
        asyncio.run(threads.in_thread(time.sleep, 5, limit=0.1))


def test_a_timeout_raised_by_the_call_itself_is_passed_on() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(threads.in_thread(fail, limit=30))


def test_a_watched_call_is_given_up_at_the_deadline() -> None:
    with pytest.raises(threads.GivenUpError):
        threads.watched(lambda: time.sleep(60), lambda: 0.0)


def test_a_call_within_a_limit_is_given_up_by_name() -> None:
    with pytest.raises(TimeoutError, match=r"could not list steps within 0\.1 s: storage does not answer"):
        threads.within(0.1, "list steps", lambda: time.sleep(60))


def test_a_call_within_a_limit_goes_on_while_something_is_heard() -> None:
    looks = []

    def alive() -> float:
        looks.append(1)
        return time.monotonic()

    def work() -> str:
        while len(looks) < 3:
            time.sleep(0.01)
        return variable.get()

    variable = contextvars.ContextVar("variable", default="of nobody")
    variable.set("of the caller")
    assert threads.within(0.001, "list steps", work, alive) == "of the caller"


def test_a_ticker_goes_on_after_an_error_until_it_is_stopped() -> None:
    calls, ended = [], threading.Event()

    def tick() -> None:
        calls.append(1)
        if len(calls) == 3:
            ended.set()
            raise threads.StopTicking
        raise ValueError("temporary")

    with threads.Ticker(tick, every=0.01):
        assert ended.wait(30)
        time.sleep(0.1)
    assert len(calls) == 3


def test_a_turn_is_held_by_one_loop_until_it_is_given_back() -> None:
    turn, first, second = threads.Turn(), asyncio.new_event_loop(), asyncio.new_event_loop()
    assert turn.take(first)
    assert not turn.take(second)
    assert not turn.take(first)  # by another coroutine of the same loop
    turn.give_back(first)
    assert turn.take(second)
    first.close()
    second.close()


def test_a_closed_loop_no_longer_holds_its_turn() -> None:
    turn, first, second = threads.Turn(), asyncio.new_event_loop(), asyncio.new_event_loop()
    assert turn.take(first)
    first.close()
    assert turn.take(second)
    turn.give_back(first)  # too late: it no longer holds the turn
    assert not turn.take(second)
    second.close()
