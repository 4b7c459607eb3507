"""Progress: the arithmetic, the bar in a real terminal, the log lines without one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import pty
import re
import subprocess
import sys
import threading
import types
from typing import cast

import jax
import pytest

from orbax_ext.meeting.session import Session
from orbax_ext.plan import RestorePlan
from orbax_ext.report import progress
from orbax_ext.report.progress import ProgressSnapshot, Tracker
from orbax_ext.report.recorder import Recorder

pytestmark = pytest.mark.once

MB = 1_000_000
RESTORE_PLAN = RestorePlan(strategy="spread", leaves=(), groups=(), direct={})


def _look(
    tracker: Tracker, now: float, read: dict[int, int], bounds: tuple[int, int] = (0, 1000 * MB)
) -> ProgressSnapshot:
    return tracker.look(now, "read group 1 of 2", 1000 * MB, bounds, read, {3: "node-3"})


def test_bytes_rate_and_remaining_time_are_of_all_processes_together() -> None:
    tracker = Tracker()
    _look(tracker, 0.0, {0: 0})
    snapshot = _look(tracker, 10.0, {0: 100 * MB, 3: 50 * MB, 5: 100 * MB})
    assert (snapshot.done, snapshot.rate, snapshot.remaining) == (250 * MB, 25 * MB, 30.0)
    assert str(snapshot) == (
        "read group 1 of 2: 250.0 MB of 1.0 GB, 25.0 MB/s, 30.0 s left, slowest reader: process 3 (node-3) with 50.0 MB"
    )


def test_compressed_bytes_count_in_full_once_their_group_is_read() -> None:
    assert _look(Tracker(), 0.0, {0: 10 * MB}, bounds=(500 * MB, 1000 * MB)).done == 500 * MB


def test_bytes_that_are_read_twice_do_not_count_beyond_the_groups_that_were_begun() -> None:
    assert _look(Tracker(), 0.0, {0: 900 * MB}, bounds=(0, 500 * MB)).done == 500 * MB


def test_the_rate_is_over_the_last_seconds() -> None:
    tracker = Tracker()
    for second in range(100):
        _look(tracker, second, {0: min(second, 50) * 10 * MB + max(0, second - 50) * MB})
    assert _look(tracker, 100, {0: 550 * MB}).rate == pytest.approx(MB, rel=0.05)


def test_the_rate_of_a_restore_that_stalls_falls() -> None:
    tracker = Tracker()
    for now, read in ((0.0, 0), (1.0, 100 * MB), (101.0, 100 * MB)):
        snapshot = _look(tracker, now, {0: read})
    assert snapshot.rate == pytest.approx(100 * MB / 101)


def test_before_anything_is_read_there_is_no_rate_and_no_slowest_reader() -> None:
    assert str(_look(Tracker(), 0.0, {0: 0, 1: 0})) == "read group 1 of 2: 0 B of 1.0 GB"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "400 ms"), (75, "75.0 s"), (3725.2, "1 hour, 2 minutes and 5 seconds")]
)
def test_the_time_left_fits_its_magnitude(seconds: float, text: str) -> None:
    snapshot = ProgressSnapshot("read", 0, round(seconds * MB), float(MB), "")
    assert snapshot.figures[-1] == f"{text} left"
    assert str(dataclasses.replace(snapshot, rate=0.0)).endswith(snapshot.figures[0])


def test_the_last_line_counts_all_that_was_begun_and_leaves_the_recorder_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[ProgressSnapshot] = []
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.05)
    monkeypatch.setattr(progress, "_can_show_bar", lambda: False)
    monkeypatch.setattr(progress.LogLines, "show", lambda self, snapshot: shown.append(snapshot))
    monkeypatch.setattr(progress, "_bytes_by_group", lambda planned, processes: {0: 300 * MB, None: 100 * MB})
    recorder = Recorder()

    async def restore() -> None:
        with progress.shown(True, recorder):
            recorder.planned(1, (), RESTORE_PLAN)
            with recorder.span("read", group=0), recorder.span("read"):
                await asyncio.sleep(0.3)

    asyncio.run(restore())
    assert len(shown) > 1
    assert [(snapshot.done, snapshot.total) for snapshot in (shown[0], shown[-1])] == [(0, 400 * MB), (400 * MB,) * 2]
    assert recorder.groups_read == set()


def test_progress_of_several_processes_has_the_phase_and_hosts_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def bytes_by_group(_: object, processes: int) -> dict[int | None, int]:
        counted.append(processes)
        return {0: MB}

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(progress, "_bytes_by_group", bytes_by_group)
    recorder = Recorder()
    monkeypatch.setattr(recorder, "bytes_read", lambda: 300_000)
    read = {0: 1, 1: 200_000}
    session = types.SimpleNamespace(phase="read group 1 of 1", hosts={1: "node-1"}, bytes_done=lambda: read)
    recorder.attach(cast(Session, session))
    recorder.planned(1, (), RESTORE_PLAN)
    watcher = progress.Watcher(recorder)
    assert recorder.plan is not None
    with recorder.span("read", group=0):
        snapshots = [watcher.look(recorder.plan, finished=False) for _ in range(2)]
    assert str(snapshots[0]) == (
        "read group 1 of 1: 500.0 kB of 1.0 MB, slowest reader: process 1 (node-1) with 200.0 kB"
    )
    assert counted == [2]  # once for each plan


def test_an_interrupted_event_loop_leaves_no_thread_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.05)
    before = set(threading.enumerate())

    async def interrupted() -> None:
        with progress.shown(True, Recorder()):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    kept = loop.create_task(interrupted())  # a caller's traceback may keep it
    loop.call_later(0.2, loop.stop)
    loop.run_forever()
    (ticker,) = set(threading.enumerate()) - before
    loop.close()
    ticker.join(10)
    assert not ticker.is_alive()
    assert not kept.done()
    kept.get_coro().close()


SCRIPT = """
import asyncio, sys
import jax, numpy as np, orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import type_handlers
import orbax_ext
from orbax_ext.report import progress

path, wanted = sys.argv[1], sys.argv[2] == "shown"
logging.set_verbosity(logging.INFO)
logging.use_absl_handler()
progress._LOG_EVERY = 0.3
original = type_handlers.ArrayHandler.deserialize

async def slowly(*args, **kwargs):
    arrays = await original(*args, **kwargs)
    await asyncio.sleep(2)
    return arrays

state = {"weights": jax.device_put(np.random.default_rng(0).random(500_000))}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)
type_handlers.ArrayHandler.deserialize = slowly
print("begin", file=sys.stderr, flush=True)
with orbax_ext.registered(progress=wanted), ocp.StandardCheckpointer() as checkpointer:
    checkpointer.restore(path, state)
print("end", file=sys.stderr, flush=True)
"""


def _terminal(*args: str) -> str:
    """Runs the script in a terminal and returns what the terminal shows."""
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *args], stdin=side, stdout=side, stderr=side, env=env)
    os.close(side)
    output = b""
    try:
        while chunk := os.read(main, 65536):
            output += chunk
    except OSError:  # Linux raises this when the other side is closed
        pass
    finally:
        os.close(main)
        assert process.wait(60) == 0, output.decode()
    return output.decode().partition("begin")[2].partition("end")[0]


def test_a_terminal_shows_a_bar_that_moves_and_ends_full(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("rich")
    text = _terminal(str(tmp_path / "checkpoint"), "shown")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    frames = [frame for frame in re.split(r"[\r\n]+", plain) if frame.startswith("restore ")]
    assert len(frames) > 3
    assert re.search(r"restore read ━+ +2\.0 MB of 2\.0 MB", frames[-1]), frames[-1]
    assert all(" of 2.0 MB" in frame for frame in frames)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, then shown again


def test_a_terminal_shows_nothing_if_no_progress_is_wanted(tmp_path: pathlib.Path) -> None:
    text = _terminal(str(tmp_path / "checkpoint"), "silent")
    assert "restore read" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("wanted", ["shown", "silent"])
def test_without_a_terminal_there_are_log_lines(tmp_path: pathlib.Path, wanted: str) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "checkpoint"), wanted]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stderr.splitlines() if " MB of 2.0 MB" in line]
    assert bool(lines) == (wanted == "shown")
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
