"""Compiles the programs of groups while groups are being read."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from orbax_ext.plan import Group
from orbax_ext.plan.boundary import PREPARING
from orbax_ext.plan.course import Course
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.read_ahead import abandon

_AFTER = 0.1  # seconds of reading, where it is not known yet whether anything has to be compiled
_EARLY = 0.05  # seconds of reading that are enough if a small share is not read by then
_LONG = 2 * PREPARING  # seconds; what takes less to read directly may never be exchanged


class Compiling:
    """Compiles all groups of a plan, and groups that change later."""

    def __init__(self, executor: Executor, course: Course, recorder: Recorder, *, may_be_needless: bool) -> None:
        """`may_be_needless`: it is not known yet whether anything is going to be exchanged."""
        self._executor = executor
        self._course = course
        self._recorder = recorder
        self._all: asyncio.Future[None] | None = None
        self._take_over: asyncio.Future[None] | None = None
        self._changed: dict[int, asyncio.Future[None]] = {}  # by number of the group
        self._one_at_a_time = asyncio.Lock()
        self._needed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put_off_until = 0.0
        self._look: asyncio.TimerHandle | None = None
        if not may_be_needless:
            self._need()

    def begin(self, part: float, any_share: Callable[[], bool]) -> None:
        """Begins to compile all groups when they are needed, unless that has begun.

        The first share is this part of what a process would read directly; `any_share` returns whether one is read.
        """
        if self._all is None:
            groups = self._course.plan.groups
            if self._executor.is_compiled(groups):
                self._need()
            self._put_off_until = time.monotonic() + _AFTER
            early = max(_EARLY, _LONG * part)  # after which, if no share is read, reading all directly takes long
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(early, lambda: None if any_share() else self._need())
            self._all = asyncio.ensure_future(self._compile_all(groups))

    def decide(self, direct: float = math.inf) -> None:
        """Goes on at once if something is going to be exchanged, and stops if nothing is.

        `direct`: seconds that reading all the rest directly is expected to take. If they are few, the programs, which
        take as long to compile, are put off until then.
        """
        if self._course.groups_left:
            if direct > _LONG:
                self._need()
            else:
                self._put_off_until = max(self._put_off_until, time.monotonic() + direct)
            return
        if self._all is not None:
            abandon(self._all)
        self._all = asyncio.get_running_loop().create_future()
        self._all.set_result(None)

    def again(self, number: int) -> None:
        """Compiles a group that was added or has changed, after the others. It may have changed before."""
        if (before := self._changed.get(number)) is not None:
            abandon(before)
        self._changed[number] = asyncio.ensure_future(self._compile(number))

    def of_take_over(self, executor: Executor, groups: Sequence[Group]) -> None:
        """Compiles groups that travel if others read in place of a late process, once: nothing else needs the cores.

        They hold slices that the plan of the restore does not have: `executor` knows them.
        """
        if self._take_over is None:
            self._take_over = asyncio.ensure_future(executor.compile(groups))

    def of(self, number: int) -> list[asyncio.Future[None]]:
        """Returns what has to end before a group can travel."""
        return [task for task in (self._all, self._changed.get(number)) if task is not None]

    def give_up(self) -> None:
        if self._look is not None:
            self._look.cancel()
        for task in (self._all, self._take_over, *self._changed.values()):
            if task is not None:
                abandon(task)

    def _need(self) -> None:
        if not self._needed.done():
            self._needed.set_result(None)

    async def _compile_all(self, groups: Sequence[Group]) -> None:
        while not self._needed.done() and (left := self._put_off_until - time.monotonic()) > 0:
            await asyncio.wait([self._needed], timeout=left)
        await self._recorder.timed("compile", self._executor.compile(groups))

    async def _compile(self, number: int) -> None:
        async with self._one_at_a_time:
            if self._all is not None:
                await asyncio.wait([self._all])
            await self._recorder.timed("compile", self._executor.compile([self._course.plan.groups[number]]))
