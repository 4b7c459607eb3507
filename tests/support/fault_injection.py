"""Faults on the processes: context managers that break the restore inside them, stock or ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np
from orbax.checkpoint._src.multihost import multislice
from orbax.checkpoint._src.serialization import serialization

from orbax_ext import request
from orbax_ext.transfer import boxes
from orbax_ext.transfer.collectives import Exchange
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.verify import Digests

SLOW = 3.0  # seconds that a reader takes where something else has to happen meanwhile
_LONGEST_START = 60.0  # seconds until all processes have connected, also on a busy machine

Read = Callable[..., Awaitable[Any]]


def on(
    rank: int, fault: Callable[[], contextlib.AbstractContextManager[None]]
) -> contextlib.AbstractContextManager[None]:
    """Returns the fault on one process, and no fault on the others."""
    return fault() if jax.process_index() == rank else contextlib.nullcontext()


# Faults while reading.


@contextlib.contextmanager
def replaced_read(replace: Callable[[Read], Read]) -> Iterator[None]:
    """Replaces the function that reads one array on this process, for stock Orbax and for orbax_ext."""
    with (
        mock.patch.object(serialization, "async_deserialize", replace(serialization.async_deserialize)),
        mock.patch.object(boxes, "fetch", replace(boxes.fetch)),
    ):
        yield


async def _nothing(*_: Any) -> dict[int, Any]:
    """Stands in for `boxes.fetch` where every array has to be read through Orbax."""
    return {}


def before_each_read(action: Callable[[], Awaitable[None]]) -> contextlib.AbstractContextManager[None]:
    """Awaits `action` before each array is read."""

    def replace(original: Read) -> Read:
        async def read(*args: Any, **kwargs: Any) -> Any:
            await action()
            return await original(*args, **kwargs)

        return read

    return replaced_read(replace)


def read_error(error: Exception | None = None) -> contextlib.AbstractContextManager[None]:
    """Has every read fail."""

    async def fail() -> None:
        raise error or OSError("the disk is gone")

    return before_each_read(fail)


def error_while_describing() -> contextlib.AbstractContextManager[Any]:
    """Has the process fail before it meets the others, while it describes the leaves that are asked for."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no metadata here")

    return mock.patch.object(request, "_leaf_request", fail)


def slow_reads(
    seconds: float = SLOW, begun: pathlib.Path | None = None, until: pathlib.Path | None = None
) -> contextlib.AbstractContextManager[None]:
    """Delays every read, all of them at the same time, also until the file `until` exists.

    Creates the file `begun` when the first one begins.
    """

    async def wait() -> None:
        if begun is not None:
            begun.touch()
        await asyncio.sleep(seconds)
        deadline = time.monotonic() + _LONGEST_START
        while until is not None and not until.exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    return before_each_read(wait)


def slow_but_advancing(pause: float) -> contextlib.AbstractContextManager[None]:
    """Reads one array after the other, with a pause before each."""
    turn = asyncio.Lock()

    def replace(original: Read) -> Read:
        if original is boxes.fetch:
            return _nothing  # it would read many arrays at once

        async def read(*args: Any, **kwargs: Any) -> Any:
            async with turn:
                await asyncio.sleep(pause)
                return await original(*args, **kwargs)

        return read

    return replaced_read(replace)


def signal_in_read(number: signal.Signals) -> contextlib.AbstractContextManager[None]:
    """Sends the process a signal during its first read."""
    pending = [number]

    async def send() -> None:
        await asyncio.sleep(0.5)
        if pending:
            os.kill(os.getpid(), pending.pop())
        await asyncio.sleep(0.5)

    return before_each_read(send)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Takes root's right to read every file from this process."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


# Faults of processes that do not read.


@contextlib.contextmanager
def noting_connection(folder: pathlib.Path) -> Iterator[None]:
    """Creates a file in `folder` when this process has connected."""
    connect = Executor.connect

    async def connect_and_note(*args: Any, **kwargs: Any) -> None:
        await connect(*args, **kwargs)
        (folder / str(jax.process_index())).touch()

    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(Executor, "connect", connect_and_note):
        yield


@contextlib.contextmanager
def killed_once(begun: pathlib.Path, connected: pathlib.Path | None, killed: pathlib.Path) -> Iterator[None]:
    """Kills the process while the reader reads, after all have connected (see `noting_connection`).

    Stock Orbax has no such step, and dies after half of the time of a slow read.
    """

    def watch() -> None:
        while not begun.exists():
            time.sleep(0.05)
        deadline = time.monotonic() + (SLOW / 2 if connected is None else _LONGEST_START)
        while time.monotonic() < deadline and len(list(connected.iterdir()) if connected else ()) < jax.process_count():
            time.sleep(0.05)
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    yield


# Faults in the exchange.


def exception_in_exchange(implementation: str) -> contextlib.AbstractContextManager[None]:
    """Has the process run out of memory just before it enters the collective that moves data."""

    def fail() -> None:
        raise MemoryError("no room for the exchange")

    # Our first collective only opens the communicator.
    return before_collective(implementation, 2 if implementation == "ours" else 1, fail)


def killed_before_collective(implementation: str, number: int) -> contextlib.AbstractContextManager[None]:
    """Kills the process when the others enter our collective `number`; stock Orbax has only one collective."""
    number = number if implementation == "ours" else 1
    return before_collective(implementation, number, lambda: os.kill(os.getpid(), signal.SIGKILL))


@contextlib.contextmanager
def before_collective(implementation: str, number: int, action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` just before this process enters collective `number` of a restore, counted from 1."""
    owner: Any = Exchange if implementation == "ours" else multislice
    name = "_start" if implementation == "ours" else "broadcast_one_replica_to_all"
    original, calls = getattr(owner, name), 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, counting):
        yield


@contextlib.contextmanager
def damaging(leaf: str, ranks: list[int]) -> Iterator[None]:
    """Changes one element of a leaf on the last device of some processes, when it has arrived."""
    begin = Digests.begin

    def damage_and_begin(digests: Digests, arrays: Mapping[int, Any]) -> None:
        names = [requested.name for requested in digests._leaves]
        damaged = {index: _with_a_changed_element(array) for index, array in arrays.items() if names[index] == leaf}
        begin(digests, {**arrays, **(damaged if jax.process_index() in ranks else {})})

    with mock.patch.object(Digests, "begin", damage_and_begin):
        yield


def _with_a_changed_element(array: jax.Array) -> jax.Array:
    buffers = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == jax.local_devices()[-1]:
            data.reshape(-1).view(np.uint8)[-1] ^= 1
        buffers.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)
