from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from orbax_ext import errors, handler
from orbax_ext.meeting import arrival
from orbax_ext.meeting.board import LocalClient
from orbax_ext.meeting.session import Limits, Session
from orbax_ext.options import Strategy
from orbax_ext.storage import counters
from orbax_ext.upstream.array_handler import array_context

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


def test_a_restore_waits_for_one_that_waits_for_other_processes(
    other_restore: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With strategy "single" most processes read nothing, and one may read for long."""
    monkeypatch.setattr(counters, "bytes_read", lambda: 0)
    with Session(LocalClient(), 0, 1, "restore", Limits(stall=60.0)) as session:
        session.arrive({})

        async def meet() -> str:
            loop = asyncio.get_running_loop()
            ends = loop.time() + 0.6
            restoring = asyncio.ensure_future(restore(0.2))
            while loop.time() < ends:
                session._board.get("status")  # as a process that waits at a meeting does
                await asyncio.sleep(0.02)
            other_restore.close()
            return await restoring

        assert asyncio.run(meet()) == "restored"


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


def test_requests_to_a_bucket_are_limited_before_anything_is_looked_up_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def look_up(_: object, infos: Sequence[Any], __: object) -> None:
        asked.extend(infos)
        raise OSError("no bucket here")

    monkeypatch.setattr(handler, "make_request", look_up)
    monkeypatch.setattr(handler, "limit_silence_in", lambda *args, **kwargs: None)  # it sets variables of this process
    info = type_handlers.ParamInfo(name="x", parent_dir=epath.Path("gs://bucket/0"), ts_context=array_context(True))
    args = type_handlers.ArrayRestoreArgs(global_shape=(2,), dtype=np.int32)
    with pytest.raises(OSError, match="no bucket here"):
        asyncio.run(handler.BroadcastArrayHandler(request_concurrency=4).deserialize([info], [args]))
    (described,) = asked
    assert described.ts_context["gcs_request_concurrency"].to_json() == {"limit": 4}
