"""Asks storage again for what does not come: a connection may be stuck although the store is well."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from absl import logging

from orbax_ext.storage import counters
from orbax_ext.transfer.room import Room

_TIMES = 3.0  # reads are asked for again if nothing comes for so many times as long as all of them should take
_FLOOR = 5.0  # seconds; links that stop for a moment are not worth a second request
_LOOK_EVERY = 1.0  # seconds
_LEAST = 1 << 20  # bytes; how long less takes says nothing about how long more does
_AT_A_TIME = 16 << 20  # bytes that are asked for again at a time: their memory comes on top of what is planned
_KEPT = 8  # paces of a store

_paces: dict[str, collections.deque[float]] = {}  # by store: seconds per byte of the latest reads


class Repeatable(Protocol):
    """One read of several that begin together."""

    @property
    def footprint(self) -> int:
        """The bytes that it reads."""

    def begin_again(self) -> Any:
        """Begins the same read once more, into memory of its own; returns TensorStore's future."""

    def take_second(self) -> None:
        """Uses what the second read has read."""


async def answers(
    reads: Sequence[Repeatable], futures: Sequence[Any], ended: Callable[[Sequence[Any]], Awaitable[None]], store: str
) -> list[Any]:
    """Waits for reads that began just now; returns the future of each that counts.

    If nothing comes for much longer than reads from this store take, they are begun once more, and the first answer
    counts. As long as anything comes, the store is only slow. `ended` waits for TensorStore's futures.
    """
    began, waiting = time.monotonic(), asyncio.ensure_future(ended(futures))
    total, paces = sum(read.footprint for read in reads), _paces.setdefault(store, collections.deque(maxlen=_KEPT))
    done, last, bytes_read, advanced = 0, began, counters.bytes_read(), began
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY))[0]:
            now = time.monotonic()
            bytes_done = sum(read.footprint for read, one in zip(reads, futures, strict=True) if one.done())
            if bytes_done > done:
                done, last = bytes_done, now
            if (count := counters.bytes_read()) != bytes_read:
                bytes_read, advanced = count, now
            so_far = [(last - began) / max(_LEAST, done)] if done else []
            pace = max([*paces, *so_far], default=float("inf"))
            if now - max(last, advanced) > max(_FLOOR, _TIMES * pace * total):
                return await _ask_again(reads, futures, ended)
        await waiting
    finally:
        waiting.cancel()
    paces.append((time.monotonic() - began) / max(_LEAST, total))
    return list(futures)


async def _ask_again(
    reads: Sequence[Repeatable], futures: Sequence[Any], ended: Callable[[Sequence[Any]], Awaitable[None]]
) -> list[Any]:
    late = [number for number, future in enumerate(futures) if not future.done()]
    logging.warning("orbax_ext: storage does not answer %d of %d reads: asked again", len(late), len(futures))
    chosen = list(futures)
    room = Room(_AT_A_TIME)

    async def first(number: int) -> None:
        async with room.taken(reads[number].footprint):
            if futures[number].done():
                return
            counters.note_again(reads[number].footprint)
            second = reads[number].begin_again()
            both = [asyncio.ensure_future(ended([future])) for future in (futures[number], second)]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not any(map(_succeeded, (futures[number], second))):
                    await asyncio.wait(both)
                if not _succeeded(futures[number]) and _succeeded(second):
                    chosen[number] = second
                    reads[number].take_second()
            finally:
                for task in both:  # cancels the read that did not count
                    task.cancel()

    await asyncio.gather(*map(first, late))
    return chosen


def _succeeded(future: Any) -> bool:
    return future.done() and future.exception() is None
