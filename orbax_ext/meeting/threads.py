"""Blocking calls with a time limit.

All threads here are daemons. A thread that is stuck in a collective, or in a call to a service that is gone, must not
keep the event loop or the process from ending, as a thread of asyncio's own executor would.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from absl import logging

T = TypeVar("T")

JOIN_LIMIT = 5.0  # seconds that the end of a `with` block waits for a ticker; a stuck service is not waited for
_LOOK_EVERY = 0.2  # seconds between two looks at a deadline, which may move


class StopTicking(Exception):  # noqa: N818, like StopIteration
    """Raised by a ticker's function to end the ticker."""


class GivenUpError(Exception):
    """A call did not return in time. Its thread was abandoned."""


async def in_thread(function: Callable[..., T], *args: Any, limit: float | None = None) -> T:
    """Calls a blocking function in its own thread; raises `TimeoutError` if it takes longer than `limit` seconds."""
    return await result_of(begin(function, *args), getattr(function, "__name__", "a call"), limit)


def begin(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Calls a blocking function in its own thread, which starts now and goes on if nobody waits for the result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(setter: Callable[[Any], None], value: Any) -> None:
        def set_if_awaited() -> None:
            if not done.done():
                setter(value)

        if not loop.is_closed():
            loop.call_soon_threadsafe(set_if_awaited)

    def call() -> None:
        try:
            deliver(done.set_result, function(*args))
        except BaseException as error:
            deliver(done.set_exception, error)

    _start(call, getattr(function, "__name__", "call"))
    return done


async def result_of(call: asyncio.Future[T], name: str, limit: float | None) -> T:
    """Waits for a call that has begun; raises `TimeoutError` if it takes more than `limit` seconds from now on."""
    try:
        return await asyncio.wait_for(call, limit)
    except TimeoutError:
        if call.done() and not call.cancelled():  # raised by the function itself
            raise
        raise TimeoutError(f"{name} did not finish within {limit:g} s") from None


def watched(function: Callable[[], T], deadline: Callable[[], float]) -> T:
    """Calls a blocking function in its own thread; raises `GivenUpError` after `deadline()`, which may move."""
    outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def call() -> None:
        try:
            outcome.put((True, function()))
        except BaseException as error:
            outcome.put((False, error))

    _start(call, "watched call")
    while True:
        try:
            succeeded, value = outcome.get(timeout=_LOOK_EVERY)
        except queue.Empty:
            if time.monotonic() > deadline():
                raise GivenUpError from None
            continue
        if succeeded:
            return value
        raise value


def within(limit: float, what: str, function: Callable[[], T], alive: Callable[[], float] = lambda: 0.0) -> T:
    """Calls a function that may wait for storage; raises `TimeoutError` once nothing was heard for `limit` seconds.

    `alive` returns when something was last heard: what the function waits for then has limits of its own. The function
    sees the context variables of the caller. `what` completes the message "could not ...".
    """
    heard = time.monotonic()

    def deadline() -> float:
        nonlocal heard
        heard = max(heard, alive())
        return heard + limit

    try:
        return watched(functools.partial(contextvars.copy_context().run, function), deadline)
    except GivenUpError:
        raise TimeoutError(f"could not {what} within {limit:g} s: storage does not answer") from None


class Ticker:
    """Calls a function every `every` seconds, in its own thread, as long as a `with` block lasts."""

    def __init__(self, function: Callable[[], None], every: float) -> None:
        self._function = function
        self._every = every
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._thread = _start(self._tick, "ticker")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_LIMIT)  # what is published later may stay behind when the session has ended

    def _tick(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._function()
            except StopTicking:
                return
            except Exception as error:  # progress is optional: the restore goes on
                logging.log_first_n(logging.WARNING, "orbax_ext: could not publish progress: %s", 1, error)


def when_closed(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Calls a function when a loop is closed, in the thread that closes it, before `close` returns.

    A loop may live long and is passed often: only the first function counts, so all pass the same one.
    """

    def close_and_call(close: Callable[[], None]) -> None:
        close()
        function()

    if not isinstance(loop.close, functools.partial):
        loop.close = functools.partial(close_and_call, loop.close)  # type: ignore[method-assign]


class Turn:
    """A lock for coroutines of different event loops. A loop that is closed no longer holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: asyncio.AbstractEventLoop | None = None

    def take(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Takes the lock for a loop; returns False if it is held."""
        with self._lock:
            if self._holder is not None and not self._holder.is_closed():
                return False
            self._holder = loop
            return True

    def give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        """Releases the lock, if the loop still holds it."""
        with self._lock:
            if self._holder is loop:
                self._holder = None


def _start(function: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True, name=f"orbax_ext {name}")
    thread.start()
    return thread
