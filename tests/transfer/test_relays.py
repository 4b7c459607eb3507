"""The order in which groups of blocks travel from host to host, and that every process takes part in all of them."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import jax
import numpy as np
import pytest

from orbax_ext.plan.holders import Relay, RelayGroup
from orbax_ext.transfer import packing, relays
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.local_pipeline import LocalPipeline
from orbax_ext.transfer.relays import RelayExecutor

pytestmark = pytest.mark.once

LIMIT = 20.0  # seconds


class Recorded(RelayExecutor):
    """Moves nothing, but notes what it would move. What travels arrives when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(Any, {}, LIMIT)  # type: ignore[arg-type]
        self.started: list[Any] = []
        self.fails: Callable[[Relay], bool] = lambda relay: False
        self.travels, self.arrived = threading.Event(), threading.Event()
        monkeypatch.setattr(jax, "block_until_ready", self._wait)

    def _wait(self, _: Any) -> None:
        self.travels.set()
        assert self.arrived.wait(LIMIT)

    def _operand(self, group: RelayGroup, relay: Relay, loaded: Mapping[int, DeviceBlocks]) -> Any:
        if self.fails(relay):
            raise MemoryError("no room for the operand")
        return relay.words

    def _exchange(self, group: RelayGroup) -> Any:
        return self

    def _op(self, group: RelayGroup, relay: Relay) -> Any:
        return relay.words

    def run(self, ops: tuple[Any, ...], operands: list[Any]) -> list[DeviceBlocks]:
        self.started += operands
        return [{}]

    def take_part(self, ops: tuple[Any, ...]) -> None:
        self.started += [f"zeros for {op}" for op in ops]

    def _unpacked(self, relay: Any, output: DeviceBlocks) -> dict[int, DeviceBlocks]:
        return {}


def group(*numbers: int) -> RelayGroup:
    """Returns a group of relays with these numbers and no leaves."""
    return RelayGroup(0, (), (), (), (0,), tuple(Relay((), number) for number in numbers), 1)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not happened():
            await asyncio.sleep(0.01)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_a_group_starts_when_the_one_before_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Recorded(monkeypatch)

    async def two_groups() -> None:
        both = [executor.start_exchange(group(number), {}) for number in (1, 2)]
        await until(executor.travels.is_set)
        await asyncio.sleep(0.1)  # in which the second one could start
        assert executor.started == [1]
        executor.arrived.set()
        await asyncio.gather(*both)
        assert executor.started == [1, 2]

    run(two_groups())


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_restore_that_is_given_up_takes_part_in_what_was_agreed_on(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    executor = Recorded(monkeypatch)

    async def given_up() -> None:
        pipeline = LocalPipeline.__new__(LocalPipeline)
        pipeline._under_way = [executor.start_exchange(group(number), {}) for number in (1, 2)]
        pipeline._reading = _NothingToRead()  # type: ignore[assignment]
        await asyncio.sleep(seconds)
        pipeline.__exit__()
        await asyncio.sleep(0)

    run(given_up())  # also after the end of the event loop
    executor.arrived.set()
    run(until(lambda: executor.started == [1, 2]))


class _NothingToRead:
    def give_up(self, number: int) -> None:
        pass


def test_zeros_travel_in_place_of_an_operand_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Recorded(monkeypatch)
    executor.fails = lambda relay: relay.words == 2
    executor.arrived.set()

    async def fail() -> None:
        with pytest.raises(MemoryError, match="no room for the operand"):
            await executor.start_exchange(group(1, 2, 3), {})

    run(fail())
    assert executor.started == [1, "zeros for 2", 3]


def test_communicators_are_opened_in_turn_for_sums_where_a_group_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, bool]] = []

    class Exchange:
        def __init__(self, number: int) -> None:
            self.number = number

        def connect_moves(self, sums: bool) -> None:
            opened.append((self.number, sums))

    many = [RelayGroup(mesh, (), (), (), senders, (), 1) for mesh in range(10) for senders in ((0,), ())]
    monkeypatch.setattr(RelayExecutor, "_devices", lambda self, group: [[group.mesh]])
    # It gives another one at every call, as if so many were in use that none is kept.
    monkeypatch.setattr(relays, "exchange_among", lambda devices: Exchange(devices[0][0]))
    executor = RelayExecutor(Any, {}, LIMIT)  # type: ignore[arg-type]
    run(executor.connect(many))
    assert opened == [(number, True) for number in range(10)]


def test_vectors_are_filled_only_where_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[list[int]] = []

    class Vectors:
        def __init__(self, pack: Any, rows: Mapping[int, int], leaves: Any) -> None:
            filled.append([device for device, row in rows.items() if row == 0])

        def filled(self, read: Any) -> dict[Any, Any]:
            return {}

    monkeypatch.setattr(packing, "Vectors", Vectors)
    monkeypatch.setattr(relays, "is_local", lambda device: True)
    monkeypatch.setattr(relays, "placed", lambda contributions: contributions)
    executor = RelayExecutor(types.SimpleNamespace(leaves=[]), {}, LIMIT)  # type: ignore[arg-type]
    monkeypatch.setattr(executor, "_devices", lambda group: np.array([[10, 11], [12, 13], [14, 15]]))
    relay = Relay((), 4)
    moved = RelayGroup(0, (), (0, 1, -1, 1, 0, 1), ((4, 2),), (), (relay,), 1)
    summed = RelayGroup(0, (), (0, 1, -1, -1, 1, -1), ((4, 3),), (0, 3), (relay,), 1)
    for group_of_one in (moved, summed):
        executor._operand(group_of_one, relay, {})
    assert filled == [[14], [10, 14]]
