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
from unittest import mock

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
    """The process gets a signal from outside while the reader reads, when all have connected."""
    from orbax_ext.transfer.executor import Executor

    connect, connected = Executor.connect, threading.Event()

    async def connect_and_tell(*args: Any, **kwargs: Any) -> float:
        found = await connect(*args, **kwargs)
        connected.set()
        return found

    def watch() -> None:
        while not begun.exists():
            time.sleep(0.05)
        if connected.wait(_SLOW / 2):  # stock Orbax has no such step
            time.sleep(0.5)  # in which the others are through with it, too
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()
    with mock.patch.object(Executor, "connect", connect_and_tell):
        yield


def exception_in_exchange(how: str) -> contextlib.AbstractContextManager[None]:
    """The process runs out of memory just before it would enter the collective that moves data."""

    def fail() -> None:
        raise MemoryError("no room for the exchange")

    # The first collective of ours only opens the communicator.
    return before_collective(how, 2 if how == "ours" else 1, fail)


def killed_before_collective(how: str, number: int) -> contextlib.AbstractContextManager[None]:
    """The process is killed when the others enter a collective, the first or a later one; stock Orbax has only one."""
    return before_collective(how, number if how == "ours" else 1, lambda: os.kill(os.getpid(), signal.SIGKILL))


@contextlib.contextmanager
def before_collective(how: str, number: int, action: Callable[[], None]) -> Iterator[None]:
    """Something happens on this process just before it would enter a collective of a restore."""
    from orbax.checkpoint._src.multihost import multislice

    from orbax_ext.transfer.collectives import Exchange

    owner: Any = Exchange if how == "ours" else multislice
    name = "_start" if how == "ours" else "broadcast_one_replica_to_all"
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, failing):
        yield


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
