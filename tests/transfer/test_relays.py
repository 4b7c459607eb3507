"""The order in which groups of blocks travel from host to host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from orbax_ext.plan.holders import RelayGroup
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.relays import RelayExecutor

LIMIT = 20.0  # seconds


class Recorded(RelayExecutor):
    """Starts nothing, but notes what it would start."""

    def __init__(self) -> None:
        super().__init__(Any, {}, LIMIT)  # type: ignore[arg-type]
        self.started: list[int] = []

    def _start(self, group: RelayGroup, relay: Any, loaded: Mapping[int, DeviceBlocks]) -> DeviceBlocks:
        self.started.append(group.device_bytes)
        return {}

    def _unpacked(self, relay: Any, output: DeviceBlocks) -> dict[int, DeviceBlocks]:
        return {}


class OneRelay(RelayGroup):
    @property
    def leaves(self) -> tuple[int, ...]:
        return ()


def group(number: int) -> RelayGroup:
    return OneRelay(0, (), (), (), (), (None,), number)  # type: ignore[arg-type]


def test_a_group_starts_when_the_one_before_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, waiting = threading.Event(), threading.Event()

    def block_until_ready(_: Any) -> None:
        waiting.set()
        assert arrived.wait(LIMIT)

    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    executor = Recorded()

    async def two_groups() -> None:
        both = [asyncio.ensure_future(executor.exchange(group(number), {})) for number in (1, 2)]
        while not waiting.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # in which the second one could start
        assert executor.started == [1]
        arrived.set()
        await asyncio.gather(*both)
        assert executor.started == [1, 2]

    asyncio.run(two_groups())
