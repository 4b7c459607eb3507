"""Restores of the emergency manager, without a cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from etils import epath

from orbax_ext import emergency
from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.options import Options
from orbax_ext.upstream.emergency import EmergencyStep

pytestmark = pytest.mark.once

STEP = EmergencyStep(1, ("weights",), (None,), lambda: None, lambda: None)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The knobs with which storage was read, in a restore in which the hosts have nothing and took 20 seconds."""
    used, clock = [], [0.0]

    async def restore_from_hosts(*args: Any) -> tuple[dict[int, Any], epath.Path]:
        clock[0] += 20.0
        return {}, epath.Path("/persistent/1/default")

    async def deserialize(self: BroadcastArrayHandler, infos: Any, args: Any) -> list[str]:
        used.append(self.options)
        return ["restored"]

    monkeypatch.setattr(emergency, "_restore_from_hosts", restore_from_hosts)
    monkeypatch.setattr(BroadcastArrayHandler, "deserialize", deserialize)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return used


@pytest.mark.parametrize(("timeout", "left"), [(60.0, 40.0), (20.5, 1.0), (None, None)])
def test_the_timeout_is_for_hosts_and_storage_together(
    options: list[Options], timeout: float | None, left: float | None
) -> None:
    handler = BroadcastArrayHandler(timeout=timeout)
    assert list(asyncio.run(emergency._restore(handler, STEP))) == ["restored"]
    assert [used.timeout for used in options] == [left]
    assert handler.options.timeout == timeout


def test_what_no_host_has_is_spread_unless_another_strategy_was_registered(options: list[Options]) -> None:
    for handler in (BroadcastArrayHandler(), BroadcastArrayHandler(strategy="single")):
        asyncio.run(emergency._restore(handler, STEP))
    assert [used.strategy for used in options] == ["spread", "single"]
