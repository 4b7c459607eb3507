"""Waiting for blocking calls, within a limit.

All threads here are daemons: one that is stuck in a collective or in a call to a service that is gone must keep
neither the event loop nor the process from ending, as the threads of asyncio's own executor would.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from absl import logging

T = TypeVar("T")

_SHORT, _LONG = 0.5, 60.0


class StopTicking(Exception):  # noqa: N818, like StopIteration
    """Raised by a ticker's function that has nothing more to do."""


class GivenUpError(Exception):
    """A call did not come back in time; its thread was left to itself."""


async def in_thread(function: Callable[..., T], *args: Any, limit: float | None = None) -> T:
    """Calls a blocking function in a thread of its own and waits for it, `limit` seconds at most (`TimeoutError`)."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(setter: Callable[[Any], None], value: Any) -> None:
        def set_if_waited_for() -> None:
            if not done.done():
                setter(value)

        if not loop.is_closed():
            loop.call_soon_threadsafe(set_if_waited_for)

    def call() -> None:
        try:
            deliver(done.set_result, function(*args))
        except BaseException as error:
            deliver(done.set_exception, error)

    _start(call, getattr(function, "__name__", "call"))
    try:
        return await asyncio.wait_for(done, limit)
    except TimeoutError:
        if done.done() and not done.cancelled():  # the function's own
            raise
        raise TimeoutError(f"{getattr(function, '__name__', 'a call')} did not finish within {limit:g} s") from None


def watched(function: Callable[[], T], deadline: Callable[[], float]) -> T:
    """Calls a blocking function in a thread of its own until `deadline()`, which may move on meanwhile."""
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answer.put((True, function()))
        except BaseException as error:
            answer.put((False, error))

    _start(call, "watched call")
    while True:
        try:
            good, value = answer.get(timeout=min(max(_SHORT, deadline() - time.monotonic()), _LONG))
        except queue.Empty:
            if time.monotonic() > deadline():
                raise GivenUpError from None
            continue
        if good:
            return value
        raise value


class Ticker:
    """Calls a function every so often, in a thread of its own, as long as a `with` block lasts."""

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
        self._thread.join(_SHORT)  # so that nothing is published afterwards, unless the service is stuck

    def _tick(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._function()
            except StopTicking:
                return
            except Exception as error:  # those who wait for news will do without
                logging.log_first_n(logging.WARNING, "orbax_ext: could not publish progress: %s", 1, error)


class Turn:
    """A lock for coroutines of different event loops; one whose loop has been closed holds it no longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: asyncio.AbstractEventLoop | None = None

    def take(self, loop: asyncio.AbstractEventLoop) -> bool:
        with self._lock:
            if self._holder is not None and not self._holder.is_closed():
                return False
            self._holder = loop
            return True

    def give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._holder is loop:
                self._holder = None


def _start(function: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True, name=f"orbax_ext {name}")
    thread.start()
    return thread
