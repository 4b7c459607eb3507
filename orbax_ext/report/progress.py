"""Shows on process 0 how far a restore is: a bar in a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping

import jax
from absl import logging

from orbax_ext import text
from orbax_ext.meeting.threads import StopTicking, Ticker
from orbax_ext.plan import bytes_by_step
from orbax_ext.report.recorder import PlannedRestore, Recorder

_BAR_EVERY = 0.2  # seconds; quick enough to look alive
_LOG_EVERY = 5.0  # seconds; few enough lines in a log
_WINDOW = 15.0  # seconds over which the rate is measured


@dataclasses.dataclass(frozen=True)
class ProgressSnapshot:
    """How far a restore is, all processes together."""

    phase: str
    done: int  # bytes
    total: int
    rate: float  # bytes per second, over the last seconds
    slowest: str  # the reader that has read least, with its bytes; "" if fewer than two processes have read

    @property
    def remaining(self) -> float | None:
        """Seconds until all is read at this rate; None without a rate."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    @property
    def figures(self) -> list[str]:
        """Bytes, rate, time left and the slowest reader, as far as they are known."""
        figures = [f"{text.size(self.done)} of {text.size(self.total)}"]
        if self.remaining is not None:
            figures += [f"{text.size(self.rate)}/s", f"{text.seconds(self.remaining)} left"]
        return [*figures, f"slowest reader: {self.slowest}"] if self.slowest else figures

    def __str__(self) -> str:
        return f"{self.phase}: {', '.join(self.figures)}"


class Tracker:
    """Makes snapshots from the bytes that each process has read. Pure: it has no clock of its own."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def look(
        self,
        now: float,
        phase: str,
        total: int,
        bounds: tuple[int, int],
        read: Mapping[int, int],
        hosts: Mapping[int, str],
    ) -> ProgressSnapshot:
        """Returns a snapshot.

        `read` has the bytes that each process has read from storage. They can be fewer than the bytes in memory
        (compressed) or more (read twice), so `bounds` are the least and the most of `total` that can be done.
        """
        least, most = bounds
        done = min(max(sum(read.values()), least), most)
        if not self._seen or done > self._seen[-1][1]:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        return ProgressSnapshot(phase, done, total, rate, _slowest(read, hosts))


class Bar:
    """A bar in a terminal."""

    def __init__(self) -> None:
        from rich import console, progress  # optional

        columns = (
            progress.TextColumn("restore {task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[figures]}"),
        )
        self._progress = progress.Progress(*columns, console=console.Console(stderr=True), auto_refresh=False)
        self._task = self._progress.add_task("", figures="")

    def show(self, snapshot: ProgressSnapshot) -> None:
        figures, total = "  ".join(snapshot.figures), max(1, snapshot.total)
        self._progress.update(
            self._task, description=snapshot.phase, completed=snapshot.done, total=total, figures=figures
        )
        self._progress.start()  # once it has something to show; later calls do nothing
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


class LogLines:
    """Lines of the log."""

    def show(self, snapshot: ProgressSnapshot) -> None:
        logging.info("orbax_ext: %s", snapshot)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def shown(wanted: bool, recorder: Recorder) -> Iterator[None]:
    """Shows, on process 0 and if `wanted`, how far a restore is while a `with` block of a coroutine runs."""
    if not wanted or jax.process_index() != 0:
        yield
        return
    in_terminal, watcher = _can_show_bar(), Watcher(recorder)
    loop = asyncio.get_running_loop()
    displays: list[Bar | LogLines] = []  # made at the first tick: a short restore shows nothing
    with contextlib.ExitStack() as stack:

        def tick(*, finished: bool = False) -> None:
            if loop.is_closed():  # a KeyboardInterrupt closes it without leaving the block (Orbax 0.12.0 and later)
                stack.close()
                raise StopTicking
            planned = recorder.plan
            if planned is not None:
                if not displays:
                    displays.append(Bar() if in_terminal else LogLines())
                    stack.callback(displays[0].close)
                displays[0].show(watcher.look(planned, finished))

        with Ticker(tick, _BAR_EVERY if in_terminal else _LOG_EVERY):
            yield
        if displays:
            tick(finished=True)


class Watcher:
    """Reads from a recorder how far its restore is."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._tracker = recorder, Tracker()
        self._bytes_by_group = functools.lru_cache(maxsize=1)(_bytes_by_group)  # slow if there are many leaves

    def look(self, planned: PlannedRestore, finished: bool) -> ProgressSnapshot:
        """Returns a snapshot; if `finished`, all groups that were begun count as read."""
        recorder, session = self.recorder, self.recorder.session
        bytes_by_group = self._bytes_by_group(planned, 1 if session is None else jax.process_count())
        begun = recorder.groups_begun | recorder.groups_read
        passed = begun if finished else recorder.groups_read
        least, most = (sum(bytes_by_group.get(group, 0) for group in groups) for groups in (passed, begun))
        now, total, read = time.monotonic(), sum(bytes_by_group.values()), {0: recorder.bytes_read()}
        if session is None:
            return self._tracker.look(now, "read", total, (least, most), read, {})
        return self._tracker.look(now, session.phase, total, (least, most), session.bytes_done() | read, session.hosts)


def _bytes_by_group(planned: PlannedRestore, processes: int) -> Mapping[int | None, int]:
    return bytes_by_step(planned.plan, planned.meshes, processes)


def _slowest(read: Mapping[int, int], hosts: Mapping[int, str]) -> str:
    readers = {process: count for process, count in read.items() if count}
    if len(readers) < 2:
        return ""
    process = min(readers, key=lambda reader: (readers[reader], reader))
    return f"{text.process(process, hosts)} with {text.size(readers[process])}"


def _can_show_bar() -> bool:
    terminal = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return terminal and importlib.util.find_spec("rich") is not None
