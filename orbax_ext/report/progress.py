"""How far a restore is, for whoever watches process 0: a bar in a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
from absl import logging

from orbax_ext.meeting.threads import StopTicking, Ticker
from orbax_ext.plan import bytes_by_step
from orbax_ext.report.recorder import Recorder
from orbax_ext.text import size

_BAR_EVERY = 0.2
_LOG_EVERY = 5.0
_WINDOW = 15.0  # seconds that a rate is measured over

Hosts = Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """How far a restore is, all processes together."""

    phase: str
    done: int  # bytes
    total: int
    rate: float  # bytes per second, lately
    slowest: str  # the reader that has read least, or ""

    @property
    def remaining(self) -> float | None:
        """Seconds until all is read at this rate, None where that can't be told."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def __str__(self) -> str:
        text = f"{self.phase}: {size(self.done)} of {size(self.total)}"
        if self.rate > 0:
            text += f", {size(self.rate)}/s, {clock(self.remaining)} left"
        return text + (f", slowest reader {self.slowest}" if self.slowest else "")


class Tracker:
    """Turns what is known of each process's reading into snapshots."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def look(
        self, now: float, phase: str, total: int, bounds: tuple[int, int], read: Mapping[int, int], hosts: Hosts
    ) -> Snapshot:
        """`read` is how much each process has read from storage; `bounds` are how much of `total` that can mean."""
        least, most = bounds
        done = min(max(sum(read.values()), least), most)
        if not self._seen or done > self._seen[-1][1]:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        readers = {process: count for process, count in read.items() if count}
        slowest = ""
        if len(readers) > 1:
            process = min(readers, key=lambda each: (readers[each], each))
            host = f" ({hosts[process]})" if process in hosts else ""
            slowest = f"{process}{host} with {size(readers[process])}"
        return Snapshot(phase, done, total, rate, slowest)


class Display(Protocol):
    """Where progress is shown."""

    def show(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


class Bar:
    """A bar of rich in a terminal."""

    def __init__(self) -> None:
        from rich import console, progress

        columns = (
            progress.TextColumn("restore {task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[figures]}"),
        )
        self._progress = progress.Progress(*columns, console=console.Console(stderr=True), auto_refresh=False)
        self._task: Any = None

    def show(self, snapshot: Snapshot) -> None:
        figures = f"{size(snapshot.done)} of {size(snapshot.total)}"
        if snapshot.rate > 0:
            figures += f"  {size(snapshot.rate)}/s  {clock(snapshot.remaining)} left"
        if snapshot.slowest:
            figures += f"  slowest: {snapshot.slowest}"
        if self._task is None:
            self._task = self._progress.add_task(snapshot.phase, total=snapshot.total, figures=figures)
            self._progress.start()
        self._progress.update(
            self._task,
            description=snapshot.phase,
            completed=snapshot.done,
            total=max(1, snapshot.total),
            figures=figures,
            refresh=True,
        )

    def close(self) -> None:
        self._progress.stop()


class LogLines:
    """Lines of the ordinary log."""

    def show(self, snapshot: Snapshot) -> None:
        logging.info("orbax_ext: %s", snapshot)

    def close(self) -> None:
        pass


@contextlib.contextmanager
def shown(wanted: bool, recorder: Recorder) -> Iterator[None]:
    """Shows, on process 0 and if it is wanted, how far a restore is as long as a `with` block of a coroutine lasts."""
    if not wanted or jax.process_index() != 0:
        yield
        return
    in_terminal, look = _can_show_bar(), _looker(recorder)
    loop = asyncio.get_running_loop()
    displays: list[Display] = []  # made when it is first needed: a short restore does without

    def tick(*, finished: bool = False) -> None:
        if loop.is_closed():  # as a KeyboardInterrupt leaves it, which ends no block (Orbax 0.12.0 and later)
            _close(displays)
            raise StopTicking
        if recorder.plan is not None:
            if not displays:
                displays.append(Bar() if in_terminal else LogLines())
            displays[0].show(look(finished))

    try:
        with Ticker(tick, _BAR_EVERY if in_terminal else _LOG_EVERY):
            yield
        if displays:
            tick(finished=True)
    finally:
        _close(displays)


def clock(seconds: float | None) -> str:
    """A duration as 1:02:03 or 2:03."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _close(displays: list[Display]) -> None:
    while displays:
        displays.pop().close()


def _looker(recorder: Recorder) -> Callable[[bool], Snapshot]:
    tracker = Tracker()
    known: dict[tuple[int, int], dict[int | None, int]] = {}  # by plan and number of processes that it is about

    def look(finished: bool) -> Snapshot:
        session, planned = recorder.session, recorder.plan
        assert planned is not None
        processes = 1 if session is None else jax.process_count()
        key = (id(planned), processes)
        if key not in known:
            known[key] = bytes_by_step(planned.plan, planned.meshes, processes)
        steps = known[key]
        begun = recorder.groups_begun | recorder.groups_read
        read_by_all = begun if finished else recorder.groups_read
        bounds = _sum(steps, read_by_all), _sum(steps, begun)
        read = {0: recorder.bytes_read()}
        if session is None:
            return tracker.look(time.monotonic(), "read", sum(steps.values()), bounds, read, {})
        read = session.bytes_done() | read
        return tracker.look(time.monotonic(), session.phase, sum(steps.values()), bounds, read, session.hosts)

    return look


def _sum(steps: Mapping[int | None, int], groups: Iterable[int | None]) -> int:
    return sum(steps.get(group, 0) for group in groups)


def _can_show_bar() -> bool:
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    return importlib.util.find_spec("rich") is not None
