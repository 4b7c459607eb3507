"""Storage that is slow or late on this process, in the same way for all handlers: reads end later."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from orbax_ext.storage import counters
from orbax_ext.transfer import boxes
from orbax_ext.upstream import reads


def late(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Holds back all reads until so many seconds from now."""
    end = time.monotonic() + seconds

    def replace(original: reads.Read) -> reads.Read:
        async def read(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(end - time.monotonic())
            return await original(*args, **kwargs)

        return read

    return _every_read(replace)


def paced(bytes_per_second: float) -> contextlib.AbstractContextManager[None]:
    """Lets this process read at most so many bytes a second: a read ends when a link of that speed would have done."""
    link = _Link(bytes_per_second)

    def replace(original: reads.Read) -> reads.Read:
        async def read(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            array = await original(*args, **kwargs)
            await asyncio.sleep(link.take(began) - time.monotonic())
            return array

        return read

    return _every_read(replace)


@contextlib.contextmanager
def _every_read(replace: Callable[[reads.Read], reads.Read]) -> Iterator[None]:
    """Replaces the two functions that read arrays: Orbax's, and that of orbax_ext for what travels."""
    original = boxes.fetch
    boxes.fetch = replace(original)  # type: ignore[assignment]
    try:
        with reads.replaced(replace):
            yield
    finally:
        boxes.fetch = original


class _Link:
    """The time at which a link of limited speed has carried all bytes that TensorStore has read so far."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()  # reads may run in several event loops
        self._counted = counters.bytes_read()
        self._free = 0.0

    def take(self, began: float) -> float:
        with self._lock:
            total = counters.bytes_read()
            self._free = max(self._free, began) + (total - self._counted) / self._rate
            self._counted = total
            return self._free
