"""Reads that end when storage stops answering. TensorStore has no deadline for a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from orbax_ext.storage import counters

T = TypeVar("T")

REQUEST_LIMIT = 600.0  # seconds for one request of a command that reads a checkpoint without a restore
_LOOK_EVERY = 1.0  # seconds


async def while_storage_answers(work: Coroutine[Any, Any, T], stall: float) -> T:
    """Awaits work that reads from storage; raises `TimeoutError` if no request is made for `stall` seconds."""
    task = asyncio.ensure_future(work)
    requests, since = counters.requests(), time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=min(stall, _LOOK_EVERY)))[0]:
            if counters.requests() != requests:
                requests, since = counters.requests(), time.monotonic()
            elif time.monotonic() - since > stall:
                raise TimeoutError(f"storage has not answered for {stall:g} s (stall_timeout)")
        return task.result()
    finally:
        if not task.get_loop().is_closed():  # Orbax may close it under a restore
            task.cancel()
