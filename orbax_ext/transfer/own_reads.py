"""A process's own shares, and how fast it reads them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from orbax_ext.storage import counters
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.rates import LatestRate, Stopwatch
from orbax_ext.transfer.read_ahead import ReadAhead, abandon

_LONG_ENOUGH = 1.0  # seconds of reading; what takes less is not worth dealing again, and says little about storage
_PROBE_EVERY = 2.0  # seconds between two reads that nobody needs


class OwnReads(ReadAhead[list[DeviceBlocks] | None]):
    """Reads the shares of this process, and knows whether it is stuck.

    A process that is stuck gets no shares to read. So that it notices when storage answers again, it reads one share
    that nobody waits for.
    """

    def __init__(self, read: Callable[[int], Awaitable[list[DeviceBlocks]]], ahead: int, busy: Stopwatch) -> None:
        super().__init__(read, ahead, busy)
        self.stuck = False  # it was late or failed, and has read nothing since
        self._rate = LatestRate(at_least=_LONG_ENOUGH)
        self._bytes_before = counters.bytes_read()
        self._probe: asyncio.Future[Any] | None = None
        self._probed = -math.inf  # when something was read last only to measure
        self.compared = False  # it has read a share only to be compared with the reader; that is done once

    @property
    def rate(self) -> float | None:
        """Bytes per second, with two digits; 0 for a process that is stuck, None if it has not read yet."""
        if self.stuck:
            return 0.0
        return float(f"{self._rate.usual:.2g}") if self._rate.seconds > 0 else None

    @property
    def long(self) -> bool:
        """Whether its rate was measured for so long that others should read in its place if they are faster."""
        return self._rate.seconds >= _LONG_ENOUGH

    def advanced(self) -> None:
        """Notes that something was read."""
        self.stuck = False
        self._rate.add(counters.bytes_read() - self._bytes_before, self._busy.seconds)

    def leave(self, numbers: Sequence[int], *, stuck: bool) -> None:
        """Leaves groups to others; None stands for what was read of them.

        If this process is `stuck`, the first of these reads goes on, to show when storage answers again.
        """
        self.stuck = self.stuck or stuck
        for number in numbers:
            task = self.replace(number, None)
            if task.done() or not stuck or self._probing:
                abandon(task)
            else:
                self._watch(task)

    def probe(self, read: Coroutine[Any, Any, Any]) -> bool:
        """Reads something that nobody waits for, to measure the rate. Returns False if it has done so just now."""
        if self._probing or time.monotonic() - self._probed < _PROBE_EVERY:
            read.close()
            return False
        self._probed = time.monotonic()

        async def timed() -> None:
            with self._busy:
                await read
            self.advanced()

        self._watch(asyncio.ensure_future(timed()))
        return True

    def give_up_all(self) -> None:
        self.give_up(0)
        if self._probe is not None:
            abandon(self._probe)

    @property
    def _probing(self) -> bool:
        return self._probe is not None and not self._probe.done()

    def _watch(self, task: asyncio.Future[Any]) -> None:
        self._probe = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
