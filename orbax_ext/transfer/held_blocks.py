"""Blocks that were read ahead into host memory, and the restore that takes them from there.

A restore that is called inside `Taking` looks here before it reads. What is not here, it reads as always; so what is
here makes a restore shorter and changes nothing else about it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from orbax.checkpoint import type_handlers

from orbax_ext.plan import RestorePlan
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer.boxes import HostBlocks, ReadItem
from orbax_ext.transfer.read_ahead import succeeded

T = TypeVar("T")

Held = Mapping[int, HostBlocks]  # by index in the plan
CompilePrograms = Callable[[threading.Event], None]  # ends early when the event is set


@dataclasses.dataclass(frozen=True)
class PlannedShare:
    """What this process reads of a restore: planned in the same way as the restore itself will plan it."""

    handler: type_handlers.ArrayHandler
    request: Request
    plan: RestorePlan
    saved: str | None = None  # identifies the save, from before anything was read; None if that is not known


@dataclasses.dataclass
class Unit:
    """What is read together and taken together: this process's share of a group, or some leaves."""

    items: tuple[ReadItem, ...]
    bytes: int
    blocks: concurrent.futures.Future[Held] = dataclasses.field(default_factory=concurrent.futures.Future)


class HeldBlocks:
    """What is held for one restore: shares of the first groups of its plan, then leaves that are read directly.

    When all of that is held, also what others would send: whole groups, the last one first. One event loop fills it,
    another one takes from it.
    """

    def __init__(
        self,
        share: PlannedShare | None,
        units: Sequence[Unit],
        compile_programs: CompilePrograms = lambda given_up: None,
        wholes: Sequence[Unit] = (),
    ) -> None:
        """`units`: first one for each group of the plan, then others. None and no units: nothing is held.

        `wholes`: for each group again, all that this process holds of it in the end; empty if they must not be read.
        """
        self._share = share
        self.compile_programs = compile_programs  # of the exchanges; runs none
        self._units = list(units)
        self._wholes = list(wholes)
        self._group_count = 0 if share is None else len(share.plan.groups)
        self._lock = threading.RLock()  # `drop` may be called wherever Python collects garbage
        self._begun = 0  # units whose reading has begun
        self._wholes_begun = 0  # from the last one on
        self._open = True  # whether more may begin

    @property
    def share(self) -> PlannedShare:
        assert self._share is not None
        return self._share

    @property
    def bytes(self) -> int:
        """All bytes of the share."""
        return sum(unit.bytes for unit in self._units)

    @property
    def groups(self) -> int:
        """How many groups, from the first on, are held or being read."""
        return min(self._begun, self._group_count)

    @property
    def whole_groups(self) -> int:
        """How many groups, from the last on, are held as a whole. One that is still being read may be, later."""
        return sum(1 for _ in itertools.takewhile(lambda unit: succeeded(unit.blocks), reversed(self._wholes)))

    def others(self, groups: Iterable[int]) -> list[int]:
        """Returns those of these groups that the restore itself reads from storage."""
        return [group for group in groups if group >= self.groups]

    def begin(self, room: int) -> Unit | None:
        """Returns the next unit to read, if it fits into `room` bytes and nobody has begun to take."""
        with self._lock:
            if self._begun == len(self._units) or not self._may_begin(unit := self._units[self._begun], room):
                return None
            self._begun += 1
            return unit

    def begin_whole(self, room: int) -> Unit | None:
        """Returns the next whole group to read, if all of the share has begun; otherwise like `begin`."""
        with self._lock:
            left = self._wholes[: len(self._wholes) - self._wholes_begun]
            if self._begun < len(self._units) or not left or not self._may_begin(unit := left[-1], room):
                return None
            self._wholes_begun += 1
            return unit

    def _may_begin(self, unit: Unit, room: int) -> bool:
        if not self._open or unit.bytes > room:
            return False
        unit.blocks.set_running_or_notify_cancel()  # whoever stops waiting for it does not cancel it
        return True

    def freeze(self) -> None:
        """Lets no further unit begin."""
        with self._lock:
            self._open = False

    def drop(self) -> None:
        """Forgets all blocks."""
        self.freeze()
        self._units, self._begun = [], 0
        self._wholes, self._wholes_begun = [], 0

    def is_for(self, request: Request, plan: RestorePlan, saved: str | None) -> bool:
        """Returns whether a restore asks for exactly this, of the same save."""
        share = self.share
        if saved is None or saved != share.saved:
            return False
        same = request.meshes == share.request.meshes and _places(request) == _places(share.request)
        return same and plan == share.plan

    async def take_group(self, number: int) -> Held:
        """Returns this process's share of a group, as far as it is held, and forgets it."""
        return await _take(self._units[number]) if number < self.groups else {}

    async def take_whole(self, number: int) -> Held:
        """Returns all that this process holds of a group in the end, if it is held here, and forgets it.

        Forgets its share, too: the group does not travel.
        """
        if number < self.groups:
            self._units[number].blocks = _nothing()
        held = range(self._group_count - self.whole_groups, self._group_count)
        return await _take(self._wholes[number]) if number in held else {}

    async def take_direct(self, leaves: Sequence[int]) -> dict[int, HostBlocks]:
        """Returns those of these leaves that are held, and forgets them."""
        taken: dict[int, HostBlocks] = {}
        for number in range(self._group_count, self._begun):
            taken.update(await _take(self._units[number]))
        return {leaf: taken[leaf] for leaf in leaves if leaf in taken}


async def _take(unit: Unit) -> Held:
    try:
        return await asyncio.wrap_future(unit.blocks)
    except (Exception, concurrent.futures.CancelledError):
        return {}  # the restore reads it, and raises the error
    finally:
        unit.blocks = _nothing()


def _nothing() -> concurrent.futures.Future[Held]:
    future: concurrent.futures.Future[Held] = concurrent.futures.Future()
    future.set_result({})
    return future


def _places(request: Request) -> list[tuple[str, object, object]]:
    return [(os.fspath(leaf.info.parent_dir), leaf.info.name, leaf.sharding) for leaf in request.leaf_requests]


class Taking:
    """A restore that takes what is held. Use it in a `with` block around the restore, in the thread that restores."""

    def __init__(self, held: Sequence[HeldBlocks] = (), timeout: float | None = None) -> None:
        """`timeout`: seconds that the restore may take, if that is less than its handler's own limit."""
        self.held = held
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self.taken = 0  # restores that have found blocks
        self.recorder: Recorder | None = None  # of the restore, once it has begun
        self.saved: str | None = None  # identifies the save that is restored now
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None
        self._cancelled = False
        self._may_end = True  # whether `cancel` may end the coroutine wherever it waits now
        self._refuse: Callable[[], object] = _nobody_meets

    def left(self, timeout: float | None) -> float | None:
        """Returns the seconds that the restore may still take; at most `timeout`."""
        if self._deadline is None:
            return timeout
        left = max(0.0, round(self._deadline - time.monotonic(), 1))  # messages say it
        return left if timeout is None else min(left, timeout)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        token = _taking.set(self)
        try:
            yield
        finally:
            _taking.reset(token)

    def claim(self, request: Request, plan: RestorePlan) -> HeldBlocks:
        """Returns what is held for a restore, which may be nothing. Nothing more is read ahead for it."""
        found = next((held for held in self.held if held.is_for(request, plan, self.saved)), None)
        if found is None:
            if len(self.held) == 1:  # what is read for it is not wanted
                self.held[0].freeze()
            return HeldBlocks(None, ())
        found.freeze()
        self.taken += 1
        return found

    def cancel(self) -> None:
        """Ends the restore in another thread, if it has begun; otherwise lets it not begin.

        Where the other processes may already go on with this one, it goes on too: they would wait for ever in a
        collective, be it an exchange or the barrier that Orbax enters after a restore.
        """
        self._cancelled = True
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, task)

    def _end(self, task: asyncio.Task[object]) -> None:
        """Called in the event loop: the task waits where `_may_end` says."""
        if self._running is None or self._running[1] is not task:
            return
        if self._may_end:
            task.cancel()
        else:
            self._refuse()

    @contextlib.contextmanager
    def running(self, *, settled: bool) -> Iterator[None]:
        """Lets `cancel` end the coroutine of a `with` block: until it calls `settle`, or not at all if it has."""
        task = asyncio.current_task()
        assert task is not None
        self._may_end, self._refuse = not settled, _nobody_meets
        self._running = (asyncio.get_running_loop(), task)
        try:
            if self._cancelled and not settled:
                raise asyncio.CancelledError
            yield
        finally:
            self._running = None

    def settle(self, refuse: Callable[[], object] | None = None) -> None:
        """Lets `cancel` end the coroutine only in `unless_cancelled`. Elsewhere it calls `refuse`.

        `refuse` lets the meeting fail at which this process is, or the next one, on all processes alike.
        """
        self._may_end, self._refuse = False, refuse or _nobody_meets

    async def unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits what this process does before it comes to a meeting: no other goes on meanwhile."""
        if self._cancelled:
            work.close()
            raise asyncio.CancelledError
        self._may_end = True
        try:
            return await work
        finally:
            self._may_end = False

    async def come(self) -> None:
        """Does nothing before a meeting, but fails if the restore has been cancelled: then it fails on all."""
        await self.unless_cancelled(asyncio.sleep(0))


def _nobody_meets() -> None:
    """Does nothing: the restore is about to end."""


_taking: contextvars.ContextVar[Taking | None] = contextvars.ContextVar("orbax_ext_taking", default=None)


def taking() -> Taking:
    """Returns what the restore under way may take; nothing if it was not called inside `Taking.scope`."""
    return _taking.get() or Taking()
