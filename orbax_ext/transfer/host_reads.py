"""Reads this process's share of restores into host memory, in a thread: no device, no other process, no barrier."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from absl import logging

from orbax_ext.redact import redact
from orbax_ext.report.progress import ProgressSnapshot, Tracker
from orbax_ext.transfer import boxes
from orbax_ext.transfer.at_exit import end_at_exit
from orbax_ext.transfer.held_blocks import CompilePrograms, HeldBlocks, Unit
from orbax_ext.upstream.array_handler import without_array_metadata

_AT_A_TIME = 2  # units, so that storage is never idle
_JOIN_LIMIT = 5.0  # seconds to wait for a thread; a read that storage does not answer is not waited for
_LOOK_EVERY = 0.1  # seconds

Source = Callable[[], HeldBlocks | None]  # finds out what will be restored; may read metadata


class HostReads:
    """The reading of one or several restores, one after the other."""

    def __init__(self, sources: Iterable[Source], limit: int, settings: Callable[[], None]) -> None:
        """Begins to read. `limit`: bytes that may be held. `settings` gives the thread the caller's JAX settings.

        The thread iterates over `sources`, so that they may look into storage.
        """
        self.held: list[HeldBlocks] = []
        self.error: Exception | None = None  # why nothing more is read ahead
        self._sources = sources
        self._limit = self._room = limit
        self._settings = settings
        self._done = 0  # bytes
        self._tracker = Tracker()
        # Of `_stopped` and `_task`. `stop` may be called wherever Python collects garbage.
        self._lock = threading.RLock()
        self._stopped = False
        self._sources_open = True
        self._shares_read = False
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._given_up = threading.Event()
        self._to_compile: queue.SimpleQueue[CompilePrograms | None] = queue.SimpleQueue()
        # Not an executor of Python: the interpreter waits for its threads at exit, and one program may take minutes.
        self._compiler = threading.Thread(target=self._compile_all, daemon=True, name="orbax_ext compile")
        self._thread = threading.Thread(target=self._run, daemon=True, name="orbax_ext read into host memory")
        self._thread.start()
        end_at_exit(self)

    @property
    def ended(self) -> bool:
        """Whether all of the share is held that may be."""
        return not self._thread.is_alive() or (self._shares_read and not self._compiler.is_alive())

    def progress(self) -> ProgressSnapshot:
        """Returns how far this process's reading is."""
        total = max(self._done, min(sum(held.bytes for held in self.held), self._limit))  # `stop` forgets the first
        return self._tracker.look(time.monotonic(), "read ahead", total, (0, total), {0: self._done}, {})

    def describe_no_more(self) -> None:
        """Lets no further restore begin to be read ahead, nor more than the share of one."""
        self._sources_open = False

    def stop(self) -> None:
        """Stops reading and forgets what is held. Does not wait."""
        self._given_up.set()
        with self._lock:
            self._stopped, self._sources_open = True, False
            if self._task is not None:
                loop, task = self._task
                loop.call_soon_threadsafe(task.cancel)
        for held in self.held:
            held.drop()

    def join(self) -> None:
        """Waits a few seconds for all threads to end."""
        self.join_reading()
        if self._compiler.ident is not None and threading.current_thread() is not self._compiler:
            self._compiler.join(_JOIN_LIMIT)

    def join_reading(self) -> None:
        """Waits a few seconds for the thread that reads to end. A program may be compiled for much longer."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_LIMIT)

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            self._settings()
            self.progress()
            self._compiler.start()
            for source in self._sources:
                held = source() if self._sources_open else None
                if held is not None and self._sources_open:
                    self.held.append(held)
                    if self._room:
                        self._to_compile.put(held.compile_programs)
                    self._read(loop, self._read_shares(held))
            self._to_compile.put(None)
            self._shares_read = True
            if not self.held and self._sources_open:
                logging.warning("orbax_ext: nothing is read ahead: found no arrays that will be restored")
            for held in self.held:  # storage is idle until `result`: what is held need not travel
                self._read(loop, self._read_whole_groups(held))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.error = error
            if not self._stopped:
                logging.warning("orbax_ext: can't read ahead, the restore reads all itself: %s", redact(repr(error)))
        finally:
            loop.close()
            self._to_compile.put(None)
            if self._stopped:
                for held in self.held:
                    held.drop()
            while self._compiler.is_alive() and not self._given_up.is_set():
                self._compiler.join(_LOOK_EVERY)  # until then the restore would have to wait for it

    def _compile_all(self) -> None:
        self._settings()
        while (compile_programs := self._to_compile.get()) is not None:
            if not self._given_up.is_set():
                with contextlib.suppress(Exception):  # the restore raises the error, if there is one
                    compile_programs(self._given_up)

    def _read(self, loop: asyncio.AbstractEventLoop, reading: Coroutine[Any, Any, None]) -> None:
        task = loop.create_task(reading)
        with self._lock:
            if self._stopped:
                task.cancel()
            self._task = (loop, task)
        try:
            loop.run_until_complete(task)
        finally:
            with self._lock:
                self._task = None

    async def _read_shares(self, held: HeldBlocks) -> None:
        async def read(unit: Unit) -> None:
            size = await self._read_unit(held, unit)
            self._done += size
            self.progress()  # the rate is that between looks

        await self._read_units(lambda: held.begin(self._room), read)

    async def _read_whole_groups(self, held: HeldBlocks) -> None:
        async def read(unit: Unit) -> None:
            await self._read_unit(held, unit)

        def begin() -> Unit | None:
            return held.begin_whole(self._room) if self._sources_open and self.error is None else None

        await self._read_units(begin, read)

    async def _read_units(
        self, begin: Callable[[], Unit | None], read: Callable[[Unit], Coroutine[Any, Any, None]]
    ) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            while (unit := begin()) is not None:
                self._room -= unit.bytes
                under_way.add(asyncio.ensure_future(read(unit)))
                if len(under_way) == _AT_A_TIME:
                    _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            if under_way:
                await asyncio.wait(under_way)
        except asyncio.CancelledError:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            raise

    async def _read_unit(self, held: HeldBlocks, unit: Unit) -> int:
        """Reads a unit; returns the bytes that are held of it."""
        try:
            blocks = await boxes.fetch(without_array_metadata(held.share.handler), unit.items) if unit.items else {}
        except BaseException as error:
            unit.blocks.set_exception(error)
            if not isinstance(error, Exception):
                raise
            self.error = error
            self._room += unit.bytes
            unit.bytes = 0  # left to the restore
            return 0
        for item in unit.items:  # a scalar travels as a vector, but is handed over as it is
            if item.leaf.slice is None and item.index in held.share.plan.direct and item.index in blocks:
                shape = item.block.shape
                blocks[item.index] = {device: block.reshape(shape) for device, block in blocks[item.index].items()}
        unit.blocks.set_result(blocks)
        held_bytes = sum(boxes.fetched_bytes(item) for item in unit.items if item.index in blocks)
        self._room += unit.bytes - held_bytes
        unit.bytes = held_bytes  # the rest could not be read, and is left to the restore
        return held_bytes
