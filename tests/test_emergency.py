"""Restores of the emergency manager, without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from orbax_ext import emergency, handler
from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.options import Options
from orbax_ext.upstream.emergency import EmergencyStep

pytestmark = pytest.mark.once

STEP = EmergencyStep(1, ("weights",), (None,), lambda: None, lambda: None)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The knobs with which storage was read, in a restore in which the hosts have nothing and took 20 seconds."""
    used, clock = [], [0.0]

    async def restore_from_hosts(*args: Any) -> tuple[dict[int, Any], list[str]]:
        clock[0] += 20.0
        return {}, ["weights in storage"]

    async def deserialize_in_turn(self: BroadcastArrayHandler, infos: Any, args: Any) -> list[str]:
        assert infos == ["weights in storage"]
        used.append(self.options)
        return ["restored"]

    monkeypatch.setattr(emergency, "_restore_from_hosts", restore_from_hosts)
    monkeypatch.setattr(BroadcastArrayHandler, "deserialize_in_turn", deserialize_in_turn)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return used


@pytest.mark.parametrize(("timeout", "left"), [(60.0, 40.0), (20.5, 1.0), (None, None)])
def test_the_timeout_is_for_hosts_and_storage_together(
    options: list[Options], timeout: float | None, left: float | None
) -> None:
    ours = BroadcastArrayHandler(timeout=timeout)
    assert list(asyncio.run(emergency._restore(ours, STEP))) == ["restored"]
    assert [used.timeout for used in options] == [left]
    assert ours.options.timeout == timeout


def test_what_no_host_has_is_spread_unless_another_strategy_was_registered(options: list[Options]) -> None:
    for ours in (BroadcastArrayHandler(), BroadcastArrayHandler(strategy="single")):
        asyncio.run(emergency._restore(ours, STEP))
    assert [used.strategy for used in options] == ["spread", "single"]


def test_no_other_restore_comes_between_hosts_and_storage(
    options: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def noting(part: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_call(*args: Any) -> Any:
            with contextlib.closing(asyncio.new_event_loop()) as another:
                taken.append(handler._turn.take(another))
            return part(*args)

        return note_and_call

    for owner, name in ((emergency, "_restore_from_hosts"), (BroadcastArrayHandler, "deserialize_in_turn")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    asyncio.run(emergency._restore(BroadcastArrayHandler(), STEP))
    assert taken == [False, False]


@pytest.mark.parametrize(("timeout", "left"), [(60.0, 35.0), (20.0, 0.0), (None, None)])
def test_later_parts_have_what_is_left_of_the_timeout(timeout: float | None, left: float | None) -> None:
    limits = emergency._what_is_left(BroadcastArrayHandler(timeout=timeout, stall_timeout=40.0), 25.0)
    assert (limits.total, limits.stall) == (left, 40.0)
    assert emergency._shortest(limits) == (40.0 if left is None else left)
