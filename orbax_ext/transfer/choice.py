"""How `auto` finds out, while the first group is read, whether exchanges or direct reads are faster."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jax

from orbax_ext.plan import MeshInfo, Rates, RestorePlan, with_cheapest
from orbax_ext.transfer.read_ahead import ReadAhead, abandon

LEAST_GROUPS = 3  # with fewer groups, measuring costs more than it can gain
PACE_AFTER = 4  # exchanges, after which their pace is compared with what the rates promised


class Choice:
    """Measures the links, and has all processes choose together.

    Until then the first group is read as if all groups were to travel. If the others are then read directly, the first
    group still travels beside them, unless that would take too long.
    """

    def __init__(self, meshes: tuple[MeshInfo, ...], bytes_read: Callable[[], int], reading: ReadAhead[Any]) -> None:
        self._meshes = meshes
        self._bytes_read = bytes_read
        self._reading = reading
        self._before = 0  # bytes that were read before the first group
        self._fabric = 0.0  # bytes per second that this process receives
        self._ended: list[float] = []  # when exchanges ended

    async def measure(self, fabric: Awaitable[float], groups: int) -> None:
        """Reads the first group while the fabric is measured."""
        self._before = self._bytes_read()
        measuring = asyncio.ensure_future(fabric)
        first = self._reading.begin(1, groups)
        try:
            await asyncio.wait(first)
            self._fabric = await measuring
        finally:
            abandon(measuring)
        for task in first:
            task.result()  # raises a read error now, so that it becomes everybody's

    def exchanged(self) -> None:
        """Takes note that an exchange has ended."""
        self._ended.append(time.monotonic())

    def rates(self) -> dict[str, float]:
        """Returns what this process has measured: bytes and exchanges per second."""
        between = self._ended[-1] - self._ended[0] if self._ended else 0.0
        pace = (len(self._ended) - 1) / between if between else 0.0
        storage = (self._bytes_read() - self._before) / max(self._reading.busy.seconds, 1e-6)
        return {"storage": storage, "fabric": self._fabric, "pace": pace}

    def decide(self, plan: RestorePlan, rates: Mapping[int, Mapping[str, Any]], done: int = 0) -> RestorePlan:
        """Returns the plan with groups after those `done` moved to direct reads where that is expected to be faster.

        It decides by the rates that all processes have measured, so all decide the same; after some exchanges, by how
        fast they follow each other.
        """

        def of_all(name: str) -> list[float]:  # processes without a measurement are ignored
            return [rate[name] for rate in rates.values() if rate[name] > 0] or [1e9]

        # All take part in the same exchanges: what they see of the fabric differs by chance.
        measured = Rates(min(of_all("storage")), statistics.median(of_all("fabric")), how="measured")
        pace = 1 / min(of_all("pace")) if done else None
        return with_cheapest(plan, self._meshes, jax.process_count(), measured, done=done, pace=pace, read=1)
