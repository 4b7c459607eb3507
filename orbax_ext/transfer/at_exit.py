"""Ends what runs in threads before the interpreter ends: a thread that is then inside C++ aborts the process."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Protocol


class Running(Protocol):
    """What runs in a thread."""

    def stop(self) -> None:
        """Ends it without waiting for it."""

    def join(self) -> None:
        """Waits a few seconds for the end."""


_running: weakref.WeakSet[Running] = weakref.WeakSet()


def end_at_exit(running: Running) -> None:
    """Ends this at the exit of the interpreter, if it still runs then."""
    _at_exit()
    _running.add(running)


@functools.cache
def _at_exit() -> None:
    atexit.register(_end_all)  # not before there is something to end: JAX's own functions have to be called after it


def _end_all() -> None:
    under_way = [*_running]
    for running in under_way:
        running.stop()
    for running in under_way:
        running.join()
