"""Reads groups before they are needed, from the front and from the back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

from orbax_ext.transfer.rates import Stopwatch

F = TypeVar("F")
L = TypeVar("L")
R = TypeVar("R")


class ReadAhead(Generic[R]):
    """Reads numbered groups in order: the one that is asked for and `ahead` more.

    It reads two at a time, so that storage is never idle, and half a group apart: two that began together would share
    storage and both arrive late, while nothing travels.
    """

    def __init__(self, read: Callable[[int], Awaitable[R]], ahead: int, busy: Stopwatch) -> None:
        """`busy` runs while a group is being read."""
        self.ahead = ahead
        self.begun = 0  # groups whose reading has begun
        self.groups_done: list[int] = []
        self.took: dict[int, float] = {}  # seconds that each group took that is read
        self._read = read
        self._busy = busy
        self.upto = 0  # groups whose reading may begin
        self._at_a_time = 1  # until it is known how long one takes
        self._tasks: dict[int, asyncio.Future[R]] = {}
        self._became_idle = asyncio.Event()

    @property
    def under_way(self) -> list[asyncio.Future[R]]:
        """Reads that have not ended."""
        return [task for task in self._tasks.values() if not task.done()]

    @property
    def idle(self) -> bool:
        """Whether all groups are read that may be read."""
        return self.begun >= self.upto and not self.under_way

    async def until_idle(self) -> None:
        """Waits until all groups are read that may be read."""
        while not self.idle:
            await self._became_idle.wait()

    def begin(self, upto: int, groups: int) -> None:
        """Begins to read groups up to a number, if there are so many."""
        self.upto = max(self.upto, min(upto, groups))
        self._go_on()

    def task(self, number: int) -> asyncio.Future[R]:
        """Returns the reading of a group that has begun and was not taken."""
        return self._tasks[number]

    def has(self, number: int) -> bool:
        """Returns whether a group is read or being read, and was neither taken nor dropped."""
        return number in self._tasks

    def take(self, number: int) -> R:
        """Returns what was read of a group. Groups are taken in order, when they are read."""
        return self._tasks.pop(number).result()

    def raise_errors(self) -> None:
        """Raises the error of a read that has failed, if there is one."""
        _raise_errors(self._tasks.values())

    def replace(self, number: int, result: R) -> asyncio.Future[R]:
        """Returns the reading of a group that nobody waits for any more, and puts a result in its place.

        The reading goes on unless it is cancelled.
        """
        task = self._tasks[number]
        self._tasks[number] = asyncio.get_running_loop().create_future()
        self._tasks[number].set_result(result)
        self._go_on()
        return task

    def give_up(self, number: int) -> None:
        """Drops what was read of a group and those after it."""
        self.groups_done = [group for group in self.groups_done if group < number]
        for later in [group for group in self._tasks if group >= number]:
            abandon(self._tasks.pop(later))
        self.begun = min(self.begun, number)
        self.upto = min(self.upto, number)

    def _go_on(self) -> None:
        while self.begun < self.upto and len(self.under_way) < self._at_a_time:
            task = asyncio.ensure_future(self._timed(self.begun))
            task.add_done_callback(lambda _: self._go_on())
            self._tasks[self.begun] = task
            self.begun += 1
        if self.idle:
            self._became_idle.set()
        else:
            self._became_idle.clear()

    async def _timed(self, number: int) -> R:
        started = time.monotonic()
        with self._busy:
            result = await self._read(number)
        self.groups_done.append(number)
        self.took[number] = time.monotonic() - started
        if self._at_a_time == 1:
            asyncio.get_running_loop().call_later((time.monotonic() - started) / 2, self._read_two_at_a_time)
        return result

    def _read_two_at_a_time(self) -> None:
        self._at_a_time = 2
        self._go_on()


class BackReads(Generic[L, R]):
    """Reads groups from the back directly, two at a time.

    None begins while something is read that is more urgent. One that has begun goes on beside that.
    """

    def __init__(
        self,
        read: Callable[[int], Awaitable[dict[L, R]]],
        until_idle: Callable[[], Awaitable[None]],
        busy: Stopwatch,
    ) -> None:
        """`until_idle` waits until nothing more urgent is being read; `busy` runs while a group is being read."""
        self.done = 0  # groups that are read, and perhaps still being handed over
        self._read = read
        self._until_idle = until_idle
        self._busy = busy
        self._two_at_a_time = asyncio.Semaphore(2)
        self._tasks: dict[int, asyncio.Future[dict[L, R]]] = {}
        self._reading: dict[int, contextlib.ExitStack] = {}  # closed when storage has nothing left to do for a group
        self._handed_over: set[int] = set()  # groups that are read; the end of their tasks does not wait for storage
        self._ends: dict[int, asyncio.Future[None]] = {}  # of reading, also if that fails or is given up

    @property
    def under_way(self) -> list[asyncio.Future[dict[L, R]]]:
        """Reads that have not ended."""
        return [task for task in self._tasks.values() if not task.done()]

    @property
    def handed_over(self) -> list[asyncio.Future[dict[L, R]]]:
        """Groups that are handed over, or are being handed over, or could not be. Nobody can take these over."""
        return [self._tasks[number] for number in self._handed_over if number in self._tasks]

    @property
    def idle(self) -> bool:
        """Whether all groups are read that were begun. They may still be handed over, which an exchange can delay."""
        return not self.unread

    @property
    def ends(self) -> list[asyncio.Future[None]]:
        """For each group that is still being read, what ends with its reading."""
        return [end for end in self._ends.values() if not end.done()]

    @property
    def failed(self) -> dict[int, BaseException]:
        """The groups that could not be read."""
        ended = {n: task for n, task in self._tasks.items() if task.done() and n not in self._handed_over}
        errors = {number: task.exception() for number, task in ended.items()}
        return {number: error for number, error in errors.items() if error is not None}

    @property
    def unread(self) -> tuple[int, ...]:
        """The groups that are not read yet."""
        return tuple(sorted(n for n, task in self._tasks.items() if not task.done() and n not in self._handed_over))

    @property
    def lacking(self) -> tuple[int, ...]:
        """The groups that are not read, or could not be read."""
        return tuple(sorted({*self.unread, *self.failed}))

    @property
    def leaves(self) -> frozenset[L]:
        """What was read so far."""
        return frozenset(leaf for task in self._tasks.values() if succeeded(task) for leaf in task.result())

    def note_handed_over(self, number: int) -> None:
        """Notes that a group is read, and is being put together with what arrived before. That can't be undone."""
        self._handed_over.add(number)
        self.done += 1
        self._reading.pop(number).close()
        self._end(number)

    def begin(self, numbers: Iterable[int]) -> None:
        """Begins to read groups, in this order."""
        for number in numbers:
            self._ends[number] = asyncio.get_running_loop().create_future()
            self._tasks[number] = asyncio.ensure_future(self._timed(number))
            self._tasks[number].add_done_callback(lambda _, number=number: self._end(number))  # type: ignore[misc]

    def arrays(self) -> dict[L, R]:
        """Returns what was read."""
        return {leaf: array for task in self._tasks.values() for leaf, array in task.result().items()}

    def raise_errors(self) -> None:
        """Raises the error of a read that has failed, if there is one."""
        _raise_errors(self._tasks.values())

    def drop(self, numbers: Iterable[int]) -> None:
        """Gives up groups that nobody waits for any more, as far as they are not read."""
        for number in set(numbers) & set(self.lacking):
            abandon(self._tasks.pop(number))

    def give_up(self) -> None:
        for task in self._tasks.values():
            abandon(task)
        self._tasks = {}

    async def _timed(self, number: int) -> dict[L, R]:
        async with self._two_at_a_time:
            await self._until_idle()
            with contextlib.ExitStack() as reading:
                reading.enter_context(self._busy)
                self._reading[number] = reading
                arrays = await self._read(number)
        if number not in self._handed_over:
            self.note_handed_over(number)
        return arrays

    def _end(self, number: int) -> None:
        if not self._ends[number].done():
            self._ends[number].set_result(None)


def succeeded(task: asyncio.Future[Any] | concurrent.futures.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _raise_errors(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


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
