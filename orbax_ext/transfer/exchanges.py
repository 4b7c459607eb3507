"""The exchanges of a restore: one travels at a time, and the next one may be agreed on meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import jax

from orbax_ext.plan import Group
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.rates import LinkRates
from orbax_ext.transfer.read_ahead import abandon


@dataclasses.dataclass(eq=False)
class AgreedExchange:
    """An exchange that all processes have agreed on at a meeting."""

    group: Group
    number: int  # of the group, for the report
    contributions: list[DeviceBlocks] | None  # of this process; None: zeros
    meet_after: float | None  # seconds after its beginning when all may meet for the next one; None: when it has ended
    already: Callable[[], frozenset[int]] = frozenset  # leaves that this process has read directly; others lack them


class Exchanges:
    """Runs exchanges one after another, in the order in which they were agreed on."""

    def __init__(
        self,
        executor: Executor,
        recorder: Recorder,
        rates: LinkRates,
        *,
        begun: Callable[[], None],
        arrived: Callable[[Mapping[int, jax.Array]], None],
    ) -> None:
        """`begun` is called when an exchange begins that had to wait, `arrived` with the arrays that one completes."""
        self.arrays: dict[int, jax.Array] = {}  # that have arrived
        self.started = 0
        self._executor = executor
        self._recorder = recorder
        self._rates = rates
        self._begun = begun
        self._arrived = arrived
        self._under_way: list[asyncio.Future[None]] = []
        self._waiting: list[AgreedExchange] = []
        self._may_meet: asyncio.Future[None] | None = None

    @property
    def waiting(self) -> int:
        """How many exchanges are agreed on and have not begun."""
        return len(self._waiting)

    @property
    def under_way(self) -> list[asyncio.Future[None]]:
        """Exchanges that have not ended, or have failed."""
        return [task for task in self._under_way if not task.done() or task.cancelled() or task.exception()]

    @property
    def before_meeting(self) -> list[asyncio.Future[None]]:
        """What has to end before all meet for the next exchange. It has the error of an exchange that has failed."""
        return [] if self._may_meet is None else [self._may_meet]

    def start(self, exchange: AgreedExchange) -> None:
        """Starts an exchange when those before it have ended."""
        self._under_way = self.under_way
        before = self._under_way[-1] if self._under_way else None
        may_meet = self._may_meet = asyncio.get_running_loop().create_future()
        may_meet.add_done_callback(lambda done: done.cancelled() or done.exception())  # maybe nobody asks for its error
        place, self.started = self.started, self.started + 1
        moving = None
        if before is not None:
            self._waiting.append(exchange)
        else:  # it begins here, not in the task, which may be cancelled before its first step: the others are inside
            moving = self._executor.start_exchange(exchange.group, exchange.contributions)
        task = asyncio.ensure_future(self._run(exchange, place, before, moving, may_meet))
        if moving is not None:
            task.add_done_callback(lambda _: abandon(moving))
        self._under_way.append(task)

    def give_up(self) -> None:
        """Waits for nothing any more, and drops what has arrived."""
        for task in self._under_way:
            abandon(task)
        for exchange in self._waiting:
            self._executor.take_part(exchange.group)  # other processes may be inside
        # This object refers to itself: what it holds would stay on the devices until Python collects garbage.
        self.arrays, self._under_way, self._waiting = {}, [], []
        self._begun = _nothing  # it may belong to an object that refers to this one

    async def _run(
        self,
        exchange: AgreedExchange,
        place: int,
        before: asyncio.Future[None] | None,
        moving: asyncio.Future[dict[int, jax.Array]] | None,
        may_meet: asyncio.Future[None],
    ) -> None:
        failed = None
        if before is not None:
            await asyncio.wait([before])
            failed = before.exception()
        if failed is not None:
            may_meet.set_exception(failed)
        elif exchange.meet_after is not None:
            asyncio.get_running_loop().call_later(exchange.meet_after, _end, may_meet)
        # Also if the one before has failed here: the other processes are inside this one.
        try:
            with self._recorder.span("exchange", group=exchange.number), self._rates.fabric_busy:
                if moving is None:
                    self._waiting.remove(exchange)
                    moving = self._executor.start_exchange(exchange.group, exchange.contributions)
                    self._begun()
                arrays = await moving
        except Exception as error:
            if not may_meet.done():
                may_meet.set_exception(error)
            raise
        already = exchange.already()
        arrays = {leaf: array for leaf, array in arrays.items() if leaf not in already}
        self.arrays |= arrays
        self._arrived(arrays)
        self._rates.exchanged(place + 1)
        _end(may_meet)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _nothing() -> None:
    pass
