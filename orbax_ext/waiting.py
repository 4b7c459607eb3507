"""Waiting for blocking calls from a coroutine, within a limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, limit: float | None = None) -> T:
    """Calls a blocking function in a thread of its own and waits for it, `limit` seconds at most.

    The thread is a daemon: one that is stuck in a collective must keep neither the event loop nor the process from
    ending, as the threads of asyncio's own executor would.
    """
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

    threading.Thread(target=call, daemon=True, name=f"orbax_ext {getattr(function, '__name__', '')}").start()
    return await asyncio.wait_for(done, limit)
