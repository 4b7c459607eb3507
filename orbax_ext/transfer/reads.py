"""What a process reads: its shares of groups that travel, groups from the back, and leaves that never travel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import jax

from orbax_ext.plan import Group
from orbax_ext.plan.boundary import shares_ahead
from orbax_ext.plan.course import Course
from orbax_ext.plan.memory import AHEAD
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.further_reads import FurtherReads
from orbax_ext.transfer.held_blocks import HeldBlocks
from orbax_ext.transfer.own_reads import OwnReads
from orbax_ext.transfer.rates import LinkRates
from orbax_ext.transfer.read_ahead import BackReads, abandon


class Reads:
    """Begins reads in the order of a course, and waits for them, but not for those that others take over."""

    def __init__(
        self,
        executor: Executor,
        course: Course,
        recorder: Recorder,
        rates: LinkRates,
        *,
        boundary_moves: bool,
        room: int,
        reason: Callable[[int], str],
        held: HeldBlocks,
        arrived: Callable[[Mapping[int, jax.Array]], None],
    ) -> None:
        """Makes reads that have not begun.

        `boundary_moves`: groups may be read directly after all. `room`: bytes per device for shares that are read
        while others are late; 0: no more than otherwise. `rates` takes note of what is read, `reason` says why
        a group is read, where that is unusual, `held` is what was read before, and `arrived` is called with arrays that
        are complete.
        """
        self.shares = OwnReads(self._read_share, AHEAD[course.plan.strategy], rates.storage_busy)
        self.back = BackReads(self._read_directly, self.shares.until_idle, rates.storage_busy)
        self.direct: asyncio.Future[dict[int, jax.Array]] | None = None
        self._executor = executor
        self._course = course
        self._boundary_moves = boundary_moves
        self.further = FurtherReads(executor, course, self.shares, room, boundary_moves=boundary_moves)
        self._recorder = recorder
        self._rates = rates
        self._reason = reason
        self._held = held
        self._arrived = arrived
        self._asked = asyncio.Event()  # the others do not want to wait for this process
        self._late = 0  # for how many they do not want to wait

    @property
    def share(self) -> asyncio.Future[list[DeviceBlocks] | None]:
        """The reading of this process's share of the group at the front."""
        return self.shares.task(self._course.ends.front)

    @property
    def is_stuck(self) -> bool:
        """Whether this process was late or failed before, and its share of the group at the front is not there."""
        if not self.shares.stuck or self.share.done():
            return False
        return self._executor.share_bytes(self._course.group(self._course.ends.front)) > 0

    @property
    def kept(self) -> list[asyncio.Future[dict[int, jax.Array]]]:
        """What nobody takes over: leaves that never travel, and groups that are read and being put together."""
        return [*self.back.handed_over, *([] if self.direct is None else [self.direct])]

    @property
    def upto(self) -> int:
        """The place before which this process has read shares, or may begin to before the next meeting is over."""
        return max(self.shares.upto, self._held.groups, self.further.end())

    @property
    def so_far(self) -> tuple[int, int, bool]:
        """How many groups are read from the front and from the back, and whether the leaves are that never travel."""
        return len(self.shares.groups_done), self.back.done, _has_ended(self.direct)

    @property
    def idle(self) -> bool:
        """Whether all is read that may be read."""
        return self.shares.idle and self.back.idle and _has_ended(self.direct)

    def unused(self, first: int) -> int:
        """Returns the bytes of shares that were read in this restore, of groups from a place on that do not travel."""
        places = [place for place in self.shares.groups_done if place >= first]
        return sum(self._executor.share_bytes(self._course.group(place)) for place in self._held.others(places))

    def begin(self, waiting: int = 0) -> None:
        """Begins to read the shares that may be read.

        So many groups before them are read and do not travel yet: they count as read ahead.
        """
        ends, ahead = self._course.ends, self.shares.ahead
        if self._boundary_moves:
            ahead = shares_ahead(ahead, self._course.replicas, ends)
        self.shares.begin(ends.front + 1 + max(0, ahead - waiting), ends.back)
        if self.further.wanted:
            self.shares.begin(self.further.end(waiting), ends.back)
        self.begin_direct()

    def begin_direct(self) -> None:
        """Begins to read leaves that never travel, whenever there are no shares to read."""

        async def read() -> dict[int, jax.Array]:
            await self.shares.until_idle()
            with self._rates.storage_busy, self._recorder.span("read"):
                leaves = list(self._course.plan.direct)
                held = await self._held.take_direct(leaves)
                arrays = await self._executor.read_direct(leaves, held, self._while_no_shares_are_read)
            self._arrived(arrays)
            return arrays

        if self.direct is None:
            self.direct = asyncio.ensure_future(read())

    def probe(self, number: int, *, compare: bool) -> None:
        """Measures how fast this process reads, if it has been dealt nothing of a group that others are slow at.

        With `compare` it also does so, once, if the only reader has nobody to be compared with.
        """
        group, planned = self._course.plan.groups[number], self._course.as_planned(number)
        if compare and not self.shares.compared and (other := self._course.as_read_by_another(number)) is not None:
            planned = other
        if planned is group or self._executor.share_bytes(group) or not (size := self._executor.share_bytes(planned)):
            return
        if self.shares.probe(self._executor.read(planned)):
            self.shares.compared = self.shares.compared or planned is not self._course.as_planned(number)
            self._recorder.again(size)

    def ask(self, late: int) -> None:
        """Notes that the others do not want to wait any longer for what so many processes read, this one included."""
        self._late = late
        self._asked.set()

    async def first_of(self, *works: Coroutine[Any, Any, None], alone: int) -> None:
        """Does works until the first one has ended, or until the others ask for what they can read themselves.

        They can't if so many processes are late as are waited for `alone`; perhaps they can when one of those is there.
        """
        self._asked.clear()
        tasks = [asyncio.ensure_future(work) for work in (*works, self._called(alone))]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                abandon(task)

    async def everything_read(self, before: tuple[int, int, bool] | None, *, strict: bool) -> None:
        """Waits until all is read that may be read; for ever if that is not more than there was `before`."""
        while not self.idle:
            under_way: list[asyncio.Future[Any]] = [*self.shares.under_way, *self.back.ends]
            if self.direct is not None and not self.direct.done():
                under_way.append(self.direct)
            if under_way:
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            else:  # one has just ended, and the next one is about to begin
                await asyncio.sleep(0)
            if strict:
                self.shares.raise_errors()
                self.back.raise_errors()
        if self.direct is not None and self.direct.done():
            self.direct.result()  # nobody takes these leaves over
        if self.so_far == before:
            await asyncio.Event().wait()

    def give_up(self) -> None:
        self.shares.give_up_all()
        self.back.give_up()
        if self.direct is not None:
            abandon(self.direct)
        self.direct = None

    async def _called(self, alone: int) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            unread = not self.share.done() if self._course.groups_left else bool(self.back.unread)
            if unread and (not alone or self._late < alone):
                return

    async def _read_share(self, place: int) -> list[DeviceBlocks]:
        group, number = self._course.group(place), self._course.order[place]
        with self._recorder.span("read", group=number, note=self._reason(number)):
            as_planned = group == self._course.as_planned(number)
            held = await self._held.take_group(number) if as_planned else None
            contributions = await self._executor.read(group, held)
        size = self._executor.share_bytes(group)
        if size:
            self.shares.advanced()
        if self._held.others([place]):
            self._rates.share_read(place, self._part_of_plan(group, number))
        if self._reason(number):
            self._recorder.again(size)
        return contributions

    async def _read_directly(self, number: int) -> dict[int, jax.Array]:
        group = self._course.as_planned(number)
        with self._recorder.span("read directly", group=number, size=self._executor.whole_bytes(group.leaves)):
            held = await self._held.take_whole(number)

            def all_read() -> None:
                if not held:
                    self._rates.group_read(self._course.order.index(number))
                self.back.note_handed_over(number)

            arrays = await self._executor.read_whole(group, all_read, held)
        self._arrived(arrays)
        return arrays

    def _part_of_plan(self, group: Group, number: int) -> float:
        """Returns how much a share has of what the plan asked for: other than 1 if it was dealt again."""
        planned = self._executor.share_bytes(self._course.as_planned(number))
        return self._executor.share_bytes(group) / planned if planned else 1.0

    @contextlib.asynccontextmanager
    async def _while_no_shares_are_read(self, leaves: Sequence[int]) -> AsyncIterator[None]:
        await self.shares.until_idle()
        yield
        self._rates.leaves_read(self._executor.whole_bytes(leaves))


def _has_ended(task: asyncio.Future[Any] | None) -> bool:
    return task is not None and task.done()
