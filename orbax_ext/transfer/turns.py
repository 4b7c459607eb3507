"""The order in which this process takes part in collectives: the same on all processes, also after a failed restore."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_last: threading.Event | None = None  # set when the one that was asked for last has ended


def in_turn(function: Callable[[], T], limit: float) -> Callable[[], T]:
    """Returns a function, to be called in a thread at once, that runs `function` after all that were passed before.

    It raises `TimeoutError` if it is not its turn within `limit` seconds.
    """
    global _last
    mine = threading.Event()
    with _lock:
        before, _last = _last, mine

    @functools.wraps(function)
    def call() -> T:
        try:
            if before is not None and not before.wait(limit):
                raise TimeoutError(f"an earlier exchange of this process has not ended within {limit:g} s")
            return function()
        finally:
            mine.set()

    return call
