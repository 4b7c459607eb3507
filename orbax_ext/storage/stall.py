"""Reads that end when storage stops answering. TensorStore has no deadline for a request."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from orbax_ext import errors
from orbax_ext.meeting.session import last_answer
from orbax_ext.meeting.terms import Limits
from orbax_ext.meeting.threads import GivenUpError, watched
from orbax_ext.storage import counters

T = TypeVar("T")

REQUEST_LIMIT = 600.0  # seconds for one request of a command that reads a checkpoint without a restore
_LOOK_EVERY = 1.0  # seconds


class OthersTurn:
    """Waiting for another restore of this process to end."""

    def __init__(self, limits: Limits, process: int) -> None:
        self._limits = limits
        self._process = process
        self._began = self._since = time.monotonic()
        self._progress = _progress()

    def check(self) -> None:
        """Raises `RestoreTimeoutError` if the other one does not advance, or does not end in time.

        It does not advance if it reads nothing for `limits.stall` seconds and is in no meeting with other processes.
        """
        now, stall, total = time.monotonic(), self._limits.stall, self._limits.total
        if total is not None and now - self._began > total:
            raise self._error(f"has not ended within {total:g} s (timeout)")
        if now - self._since > stall:
            if _progress() == self._progress:
                raise self._error(f"has read nothing for {stall:g} s (stall_timeout)")
            self._progress, self._since = _progress(), now

    def _error(self, why: str) -> errors.RestoreTimeoutError:
        message = (
            f"another restore of this process {why}, and this one can't begin before it ends. Look for what it waits "
            "for in the log of this process."
        )
        return errors.RestoreTimeoutError(message, [self._process], {})


def _progress() -> tuple[int, float]:
    """Returns what changes while a restore is healthy: it reads, or waits for others in a session, which has limits."""
    return counters.bytes_read(), last_answer()


async def while_storage_answers(work: Coroutine[Any, Any, T], stall: float) -> T:
    """Awaits work that reads from storage; raises `TimeoutError` if no request is made for `stall` seconds."""
    return await _while_counting(work, counters.requests, stall, _silent(stall))


def while_answered(read: Callable[[], T], requests: Callable[[], int], stall: float) -> T:
    """Calls a function that reads; raises `TimeoutError` if `requests()` stays the same for `stall` seconds.

    The function runs in a thread, which is abandoned then.
    """
    counted, since = requests(), time.monotonic()

    def deadline() -> float:
        nonlocal counted, since
        if (now := requests()) != counted:
            counted, since = now, time.monotonic()
        return since + stall

    try:
        return watched(read, deadline)
    except GivenUpError:
        raise _silent(stall) from None


def _silent(stall: float) -> TimeoutError:
    return TimeoutError(f"storage has not answered for {stall:g} s (stall_timeout)")


async def while_bytes_arrive(work: Coroutine[Any, Any, T], limits: Limits, process: int, phase: str) -> T:
    """Awaits what a process reads without the others, whose session would watch it.

    Raises `RestoreTimeoutError` if it reads nothing for `limits.stall` seconds, or has not ended after `limits.total`.
    """

    def error(what: str) -> errors.RestoreTimeoutError:
        others = "This restore reads on each process by itself; the others may have ended theirs."
        return errors.RestoreTimeoutError(f"process {process} has {what}. {others}", [process], {process: phase})

    stall, total = limits.stall, math.inf if limits.total is None else limits.total
    silent = error(f"read nothing for {stall:g} s (stall_timeout), in phase {phase!r}: storage does not answer")
    late = error(f"not read all within {total:g} s (timeout), in phase {phase!r}")
    return await _while_counting(work, counters.bytes_read, stall, silent, total, late)


async def _while_counting(
    work: Coroutine[Any, Any, T],
    count: Callable[[], int],
    stall: float,
    silent: Exception,
    total: float = math.inf,
    late: Exception | None = None,
) -> T:
    """Awaits work; raises `silent` if `count` has not changed for `stall` seconds, `late` after `total` seconds."""
    task = asyncio.ensure_future(work)
    counted, since = count(), time.monotonic()
    deadline = since + total
    try:
        while not (await asyncio.wait({task}, timeout=min(stall, total, _LOOK_EVERY)))[0]:
            if late is not None and time.monotonic() >= deadline:
                raise late
            if count() != counted:
                counted, since = count(), time.monotonic()
            elif time.monotonic() - since > stall:
                raise silent
        return task.result()
    except (Exception, asyncio.CancelledError):
        task.cancel()
        if (await asyncio.wait({task}, timeout=_LOOK_EVERY))[0] and not task.cancelled():
            task.exception()  # otherwise asyncio logs it, and that of each read
        raise
    finally:
        if not task.get_loop().is_closed():  # Orbax may close it under a restore
            task.cancel()
