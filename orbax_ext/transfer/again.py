"""Asks storage again for what does not come: a connection may be stuck although the store is well."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from absl import logging

_TIMES = 3.0  # a read that takes so many times what it should, by the pace of the others, is asked for again
_FLOOR = 5.0  # seconds; links that stop for a moment are not worth a second request
_LOOK_EVERY = 1.0  # seconds

_paces: collections.deque[float] = collections.deque(maxlen=8)  # seconds per byte of the latest reads


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
    reads: Sequence[Repeatable], futures: Sequence[Any], ended: Callable[[Sequence[Any]], Awaitable[None]]
) -> list[Any]:
    """Waits for reads that began just now; returns the future of each that counts.

    Reads that take much longer than the others need are begun once more, and the first answer counts. `ended` waits
    for TensorStore's futures.
    """
    began, waiting = time.monotonic(), asyncio.ensure_future(ended(futures))
    total, done, last = sum(read.footprint for read in reads), 0, began
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_EVERY))[0]:
            now = time.monotonic()
            bytes_done = sum(read.footprint for read, one in zip(reads, futures, strict=True) if one.done())
            if bytes_done > done:
                done, last = bytes_done, now
            pace = (last - began) / done if done else max(_paces, default=float("inf"))
            if now - began > max(_FLOOR, _TIMES * pace * total):
                return await _ask_again(reads, futures, ended)
        await waiting
    finally:
        waiting.cancel()
    _paces.append((time.monotonic() - began) / max(1, total))
    return list(futures)


async def _ask_again(
    reads: Sequence[Repeatable], futures: Sequence[Any], ended: Callable[[Sequence[Any]], Awaitable[None]]
) -> list[Any]:
    late = [number for number, future in enumerate(futures) if not future.done()]
    logging.warning("orbax_ext: storage is slow to answer %d of %d reads: asked again", len(late), len(futures))
    chosen = list(futures)
    seconds = {number: reads[number].begin_again() for number in late}

    async def first(number: int) -> None:
        both = [asyncio.ensure_future(ended([future])) for future in (futures[number], seconds[number])]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not any(map(_succeeded, (futures[number], seconds[number]))):
                await asyncio.wait(both)
            if not _succeeded(futures[number]) and _succeeded(seconds[number]):
                chosen[number] = seconds[number]
                reads[number].take_second()
        finally:
            for task in both:  # cancels the read that did not count
                task.cancel()

    await asyncio.gather(*map(first, late))
    return chosen


def _succeeded(future: Any) -> bool:
    return future.done() and future.exception() is None
