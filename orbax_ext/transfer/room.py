"""Limits how many bytes are under way at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Room:
    """Room for so many bytes at a time, in the order in which it is asked for; one that needs more gets all of it."""

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Waits until there is room for so many bytes, and takes it during the `with` block."""
        count = min(count, self._most)
        async with self._turn:
            while count > self._free:
                self._freed.clear()
                await self._freed.wait()
            self._free -= count
        try:
            yield
        finally:
            self._free += count
            self._freed.set()
