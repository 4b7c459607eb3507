"""Reading ahead: while one group of leaves travels, the next ones are read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

G = TypeVar("G")
R = TypeVar("R")


class ReadAhead(Generic[G, R]):
    """Reads groups in order: the one that is asked for and a few after it."""

    def __init__(self, read: Callable[[G], Awaitable[R]], groups: Sequence[G], ahead: int) -> None:
        self.ahead = ahead
        self._read = read
        self._groups = groups
        self._tasks: dict[int, asyncio.Future[R]] = {}

    async def take(self, number: int) -> R:
        """What was read of a group; those after it are begun, too."""
        for each in range(number, min(number + 1 + self.ahead, len(self._groups))):
            if each not in self._tasks:
                self._tasks[each] = asyncio.ensure_future(self._read(self._groups[each]))
        return await self._tasks.pop(number)

    @contextlib.contextmanager
    def until_done(self) -> Iterator[None]:
        """Gives up what is still being read when the block is left."""
        try:
            yield
        finally:
            for task in self._tasks.values():
                task.cancel()
                # Its error, if it has one, is not news any more.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._tasks.clear()


async def both(first: Awaitable[G], second: Awaitable[R]) -> tuple[G, R]:
    """Runs two coroutines at a time and waits for both, also when one fails."""
    one, other = await asyncio.gather(first, second, return_exceptions=True)
    for result in (one, other):
        if isinstance(result, BaseException):
            raise result
    return one, other  # type: ignore[return-value]
