"""The order in which this process takes part in collectives: the same on all processes, also after a failed restore."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_last: _Turn | None = None  # of what was asked for last


class _Turn:
    """A place in the order. It comes when all before have ended, also after some of those have given up."""

    def __init__(self, before: _Turn | None) -> None:
        self._before = before  # None once it has ended; it stays if this turn gives up, for those after it
        self._over = threading.Event()

    def comes(self, limit: float) -> bool:
        """Waits until it is this turn; returns False if that takes more than `limit` seconds."""
        deadline = time.monotonic() + limit
        while (before := self._before) is not None:
            if not before._over.wait(max(0.0, deadline - time.monotonic())):
                return False
            self._before = before._before
        return True

    def end(self) -> None:
        self._over.set()


def in_turn(function: Callable[[], T], limit: float) -> Callable[[], T]:
    """Returns a function, to be called in a thread at once, that runs `function` after all that were passed before.

    It raises `TimeoutError` if it is not its turn within `limit` seconds. Those after it still wait for what it has
    waited for: two exchanges at once on the same communicator would take each other's data.
    """
    global _last
    with _lock:
        turn = _last = _Turn(_last)

    @functools.wraps(function)
    def call() -> T:
        try:
            if not turn.comes(limit):
                raise TimeoutError(f"an earlier exchange of this process has not ended within {limit:g} s")
            return function()
        finally:
            turn.end()

    return call
