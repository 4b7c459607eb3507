"""What goes wrong, and where: run on the processes, around a restore that is not told about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jax

_SLOW = 3.0  # seconds that a reader takes where something else shall happen meanwhile

Reads = Callable[..., Awaitable[Any]]


@contextlib.contextmanager
def reading(replace: Callable[[Reads], Reads]) -> Iterator[None]:
    """Replaces how this process reads one array, in stock Orbax and in orbax_ext alike."""
    from orbax.checkpoint._src.serialization import serialization

    original = serialization.async_deserialize
    serialization.async_deserialize = replace(original)
    try:
        yield
    finally:
        serialization.async_deserialize = original


def read_error() -> contextlib.AbstractContextManager[None]:
    async def read(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the disk is gone")

    return reading(lambda original: read)


def signal_in_read(number: signal.Signals) -> contextlib.AbstractContextManager[None]:
    """The process gets a signal while it reads."""
    pending = [number]

    def replace(original: Reads) -> Reads:
        async def read(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.5)
            if pending:
                os.kill(os.getpid(), pending.pop())
            await asyncio.sleep(0.5)
            return await original(*args, **kwargs)

        return read

    return reading(replace)


def slow_read(begun: pathlib.Path, seconds: float = _SLOW) -> contextlib.AbstractContextManager[None]:
    """Makes a file when it begins to read, and takes its time."""

    def replace(original: Reads) -> Reads:
        async def read(*args: Any, **kwargs: Any) -> Any:
            begun.touch()
            await asyncio.sleep(seconds)
            return await original(*args, **kwargs)

        return read

    return reading(replace)


def slow_but_advancing(pause: float) -> contextlib.AbstractContextManager[None]:
    """One array after the other, with a pause before each."""
    turn = asyncio.Lock()

    def replace(original: Reads) -> Reads:
        async def read(*args: Any, **kwargs: Any) -> Any:
            async with turn:
                await asyncio.sleep(pause)
                return await original(*args, **kwargs)

        return read

    return reading(replace)


@contextlib.contextmanager
def signal_once(begun: pathlib.Path, number: signal.Signals) -> Iterator[None]:
    """The process gets a signal from outside, as soon as the reader reads."""

    def watch() -> None:
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()
    yield


@contextlib.contextmanager
def exception_in_exchange(how: str) -> Iterator[None]:
    """The process runs out of memory just before it would enter the collective that moves data."""
    from orbax.checkpoint._src.multihost import multislice

    from orbax_ext.exchange import Exchange

    owner: Any = Exchange if how == "ours" else multislice
    # The first call of ours only opens the communicator.
    name, failing_call = ("_start", 2) if how == "ours" else ("broadcast_one_replica_to_all", 1)
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise MemoryError("no room for the exchange")
        return original(*args, **kwargs)

    setattr(owner, name, failing)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


def on(rank: int, fault: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """A fault on one process, none on the others."""
    return fault() if jax.process_index() == rank else contextlib.nullcontext()


def rss_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
