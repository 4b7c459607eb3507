"""Which way is faster, where nobody has said how fast the links are: found out while the first group is read."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import jax

from orbax_ext.plan import Rates, with_cheapest
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer.executor import Execution
from orbax_ext.transfer.read_ahead import ReadAhead, abandon

LEAST_GROUPS = 3  # fewer are not worth to be looked at
PACE_AFTER = 4  # exchanges, by which it is seen whether they keep what the rates promise


class Choice:
    """Looks at the links, and has all processes choose together.

    Until then the first group is read as if all were to travel. If they are not, this one does so all the same, beside
    the others, unless that would take too long.
    """

    def __init__(self, request: Request, restore: Execution, recorder: Recorder, reading: ReadAhead[Any]) -> None:
        self._request = request
        self._restore = restore
        self._recorder = recorder
        self._reading = reading
        self._before = 0  # bytes that were read for other things
        self._fabric = 0.0  # bytes per second that this process receives
        self._ended: list[float] = []

    async def look(self, measured: Awaitable[float]) -> None:
        """Reads the first group while the fabric is looked at."""
        self._before = self._recorder.bytes_read()
        looking = asyncio.ensure_future(measured)
        first = self._reading.begin(1, len(self._restore.plan.groups))
        try:
            await asyncio.wait(first)
            self._fabric = await looking
        finally:
            abandon(looking)
        for task in first:
            task.result()  # what could not be read is everybody's failure, now

    def exchanged(self) -> None:
        """Takes note that an exchange is over."""
        self._ended.append(time.monotonic())

    def found(self) -> dict[str, float]:
        """What this process has to tell the others: bytes and exchanges per second."""
        between = self._ended[-1] - self._ended[0] if self._ended else 0.0
        pace = (len(self._ended) - 1) / between if between else 0.0
        storage = (self._recorder.bytes_read() - self._before) / max(self._reading.busy.seconds, 1e-6)
        return {"storage": storage, "fabric": self._fabric, "pace": pace}

    def decide(self, told: Mapping[int, Mapping[str, Any]], done: int = 0) -> None:
        """Chooses, by what all have found and so all alike, whether groups after those `done` are read directly.

        By the rates of the links; or, once that has been seen, by how fast exchanges follow each other.
        """

        def of_all(name: str) -> list[float]:  # a process that had nothing to find it by has no say
            return [each[name] for each in told.values() if each[name] > 0] or [1e9]

        restore, plan = self._restore, self._restore.plan
        # All take part in the same exchanges: what they see of the fabric differs by chance.
        rates = Rates(min(of_all("storage")), statistics.median(of_all("fabric")), how="measured")
        pace = 1 / min(of_all("pace")) if done else None
        meshes, processes = self._request.mesh_infos, jax.process_count()
        restore.plan = with_cheapest(plan, meshes, processes, rates, done=done, pace=pace, read=1)
        self._recorder.planned(len(self._request.leaves), self._request.mesh_infos, restore.plan)
        # From the first group that is not what it was, what has been read is of other leaves.
        same = [old == new for old, new in zip(plan.groups, restore.plan.groups, strict=False)]
        self._reading.give_up(same.index(False) if False in same else len(same))
