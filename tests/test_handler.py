from __future__ import annotations

import asyncio
import pathlib

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from orbax_ext import errors, handler
from orbax_ext.meeting import arrival
from orbax_ext.meeting.session import Limits
from orbax_ext.options import Strategy
from orbax_ext.storage import counters

pytestmark = pytest.mark.once


@pytest.fixture
def other_restore() -> asyncio.AbstractEventLoop:
    """A restore of another thread, whose turn it is."""
    loop = asyncio.new_event_loop()
    assert handler._turn.take(loop)
    return loop


async def restore(stall: float, total: float | None = None) -> str:
    async with handler.one_at_a_time(Limits(stall, total)):
        return "restored"


def test_a_restore_does_not_wait_for_ever_for_one_that_is_stuck(other_restore: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(errors.RestoreTimeoutError, match=r"another restore .* has read nothing for 0\.1 s"):
        asyncio.run(restore(0.1))
    other_restore.close()
    assert asyncio.run(restore(0.1)) == "restored"


def test_a_restore_waits_for_one_that_reads(
    other_restore: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "bytes_read", iter(range(10**6)).__next__)

    async def wait() -> str:
        asyncio.get_running_loop().call_later(0.5, other_restore.close)
        return await restore(0.1)

    assert asyncio.run(wait()) == "restored"


def test_a_restore_waits_for_one_that_reads_within_its_own_limit(
    other_restore: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "bytes_read", iter(range(10**6)).__next__)
    with pytest.raises(errors.RestoreTimeoutError, match=r"another restore .* has not ended within 0\.2 s \(timeout\)"):
        asyncio.run(restore(60, 0.2))
    other_restore.close()


@pytest.mark.parametrize("strategy", ["direct", "auto"])
def test_an_error_in_a_restore_onto_own_devices_does_not_wait_for_other_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, strategy: Strategy
) -> None:
    async def fail(*args: object) -> None:
        raise OSError("no metadata here")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(arrival, "open_session", lambda *args: pytest.fail("it meets the other process"))
    monkeypatch.setattr(handler.BroadcastArrayHandler, "_request", fail)
    sharding = NamedSharding(Mesh(np.array(jax.local_devices()[:1]), ("mine",)), PartitionSpec())
    args = type_handlers.ArrayRestoreArgs(sharding=sharding, global_shape=(2,), dtype=np.int32)
    info = type_handlers.ParamInfo(name="x", parent_dir=epath.Path(tmp_path))
    with pytest.raises(OSError, match="no metadata here"):
        asyncio.run(handler.BroadcastArrayHandler(strategy=strategy).deserialize([info], [args]))
