"""Reads groups before they are needed, and measures how long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F")
R = TypeVar("R")


class ReadAhead(Generic[R]):
    """Reads numbered groups in order: the one that is asked for and `ahead` more.

    It reads two at a time, so that storage is never idle, and half a group apart: two that began together would share
    storage and both arrive late, while nothing travels.
    """

    def __init__(self, read: Callable[[int], Awaitable[R]], ahead: int) -> None:
        self.ahead = ahead
        self.begun = 0  # groups whose reading has begun
        self.busy = Stopwatch()  # runs while one of them is being read
        self._read = read
        self._upto = 0  # groups whose reading may begin
        self._at_a_time = 1  # until it is known how long one takes
        self._tasks: dict[int, asyncio.Future[R]] = {}

    def begin(self, upto: int, groups: int) -> list[asyncio.Future[R]]:
        """Begins to read groups up to a number, if there are so many; returns the reads that were not taken yet."""
        self._upto = max(self._upto, min(upto, groups))
        self._go_on()
        return list(self._tasks.values())

    async def take(self, number: int, groups: int) -> R:
        """Returns what was read of a group, and begins the next ones. Groups are taken in order."""
        self.begin(number + 1 + self.ahead, groups)
        try:
            return await self._tasks[number]
        finally:
            self._tasks.pop(number, None)

    def give_up(self, number: int) -> None:
        """Drops what was read of a group and those after it; they may be read again."""
        for later in [group for group in self._tasks if group >= number]:
            abandon(self._tasks.pop(later))
        self.begun = min(self.begun, number)
        self._upto = min(self._upto, number)

    def _go_on(self) -> None:
        while self.begun < self._upto and sum(not task.done() for task in self._tasks.values()) < self._at_a_time:
            task = asyncio.ensure_future(self._timed(self.begun))
            task.add_done_callback(lambda _: self._go_on())
            self._tasks[self.begun] = task
            self.begun += 1

    async def _timed(self, number: int) -> R:
        started = time.monotonic()
        with self.busy:
            result = await self._read(number)
        if self._at_a_time == 1:
            asyncio.get_running_loop().call_later((time.monotonic() - started) / 2, self._read_two_at_a_time)
        return result

    def _read_two_at_a_time(self) -> None:
        self._at_a_time = 2
        self._go_on()


class Stopwatch:
    """Measures the time during which at least one `with` block is inside it."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = 0.0
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Seconds measured so far."""
        return self._before + (time.monotonic() - self._since if self._inside else 0.0)

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._before += time.monotonic() - self._since


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancels a task and ignores its error, if it has one."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def both(first: Awaitable[F], second: Awaitable[R]) -> tuple[F, R]:
    """Runs two coroutines at once and waits for both, even if one fails; raises the first error."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    for result in (one, other):
        if isinstance(result, BaseException):
            raise result
    return one, other  # type: ignore[return-value]
