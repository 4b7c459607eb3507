"""How far a restore is: the arithmetic, the bar in a real terminal, the lines where there is none."""

from __future__ import annotations

import asyncio
import os
import pathlib
import pty
import re
import subprocess
import sys
import threading

import pytest

from orbax_ext.report import progress
from orbax_ext.report.progress import Snapshot, Tracker, clock
from orbax_ext.report.recorder import Recorder

MB = 1_000_000


def _look(tracker: Tracker, now: float, read: dict[int, int], bounds: tuple[int, int] = (0, 1000 * MB)) -> Snapshot:
    return tracker.look(now, "read group 1 of 2", 1000 * MB, bounds, read, {3: "node-3"})


def test_bytes_rate_and_remaining_time_are_of_all_processes_together() -> None:
    tracker = Tracker()
    _look(tracker, 0.0, {0: 0})
    found = _look(tracker, 10.0, {0: 100 * MB, 3: 50 * MB, 5: 100 * MB})
    assert (found.done, found.rate, found.remaining) == (250 * MB, 25 * MB, 30.0)
    assert str(found) == (
        "read group 1 of 2: 250.0 MB of 1.0 GB, 25.0 MB/s, 0:30 left, slowest reader 3 (node-3) with 50.0 MB"
    )


def test_what_storage_has_compressed_counts_in_full_once_its_group_is_read() -> None:
    assert _look(Tracker(), 0.0, {0: 10 * MB}, bounds=(500 * MB, 1000 * MB)).done == 500 * MB


def test_what_is_read_twice_does_not_count_beyond_the_groups_that_were_begun() -> None:
    assert _look(Tracker(), 0.0, {0: 900 * MB}, bounds=(0, 500 * MB)).done == 500 * MB


def test_the_rate_is_that_of_the_last_seconds() -> None:
    tracker = Tracker()
    for second in range(100):
        _look(tracker, second, {0: min(second, 50) * 10 * MB + max(0, second - 50) * MB})
    assert _look(tracker, 100, {0: 550 * MB}).rate == pytest.approx(MB, rel=0.05)


def test_a_restore_that_stands_still_has_a_falling_rate() -> None:
    tracker = Tracker()
    for now, read in ((0.0, 0), (1.0, 100 * MB), (101.0, 100 * MB)):
        found = _look(tracker, now, {0: read})
    assert found.rate == pytest.approx(100 * MB / 101)


def test_before_anything_is_read_there_is_no_rate_and_no_slowest_reader() -> None:
    assert str(_look(Tracker(), 0.0, {0: 0, 1: 0})) == "read group 1 of 2: 0 B of 1.0 GB"


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0.4, "0:00"), (75, "1:15"), (3725.2, "1:02:05")])
def test_durations_read_like_a_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_an_event_loop_that_was_interrupted_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.05)
    before = set(threading.enumerate())

    async def interrupted() -> None:
        with progress.shown(True, Recorder()):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    kept = loop.create_task(interrupted())  # as a caller's traceback may keep it
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
    """What appears in a terminal in which the script is run."""
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *args], stdin=side, stdout=side, stderr=side, env=env)
    os.close(side)
    found = b""
    try:
        while chunk := os.read(main, 65536):
            found += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(main)
        assert process.wait(60) == 0, found.decode()
    return found.decode().partition("begin")[2].partition("end")[0]


def test_a_terminal_shows_a_bar_that_moves_and_ends_full(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("rich")
    text = _terminal(str(tmp_path / "checkpoint"), "shown")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    frames = [frame for frame in re.split(r"[\r\n]+", plain) if frame.startswith("restore ")]
    assert len(frames) > 3
    assert re.search(r"restore read ━+ +2\.0 MB of 2\.0 MB", frames[-1]), frames[-1]
    assert all(" of 2.0 MB" in frame for frame in frames)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is there again


def test_a_terminal_stays_clean_if_no_progress_is_wanted(tmp_path: pathlib.Path) -> None:
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
