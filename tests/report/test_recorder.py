"""What a recorder keeps of a restore, and what it shows in JAX's profiles."""

from __future__ import annotations

import asyncio
import gzip
import json
import pathlib
import types
from collections.abc import Callable
from typing import Any, cast

import jax
import pytest

from orbax_ext.meeting.session import Session
from orbax_ext.report.recorder import Recorder
from tests.support import reports


def test_a_span_is_kept_also_if_its_block_fails() -> None:
    recorder = Recorder()
    with pytest.raises(OSError, match="gone"), recorder.span("read", group=1):
        raise OSError("gone")
    (span,) = recorder.spans
    assert (span.phase, span.group) == ("read", 1)
    assert 0 <= span.start <= span.end


def test_timed_returns_the_result_of_its_work() -> None:
    recorder = Recorder()

    async def work() -> int:
        return 7

    assert asyncio.run(recorder.timed("compile", work(), group=3)) == 7
    assert [(span.phase, span.group) for span in recorder.spans] == [("compile", 3)]


def test_a_followed_future_is_recorded_when_it_is_done() -> None:
    async def follow() -> tuple[int, int]:
        recorder, future = Recorder(), asyncio.get_running_loop().create_future()
        assert recorder.follow("exchange", future, group=0) is future
        before = len(recorder.spans)
        future.set_result(None)
        await asyncio.sleep(0)
        return before, len(recorder.spans)

    assert asyncio.run(follow()) == (0, 1)


def test_a_wait_ends_now_and_names_the_last_process() -> None:
    recorder = Recorder()
    recorder.waited("arrive", 2.5, 3)
    (span,) = recorder.spans
    assert (span.phase, span.note, span.waited_for) == ("wait", "arrive", 3)
    assert span.seconds == pytest.approx(2.5)


def test_a_group_is_begun_when_its_read_starts_and_read_when_its_exchange_starts() -> None:
    recorder = Recorder()
    with recorder.span("read", group=0), recorder.span("read"):
        assert recorder.groups_begun == {0, None}
        assert recorder.groups_read == set()
    with recorder.span("exchange", group=0):
        assert recorder.groups_read == {0}


def test_the_start_is_by_the_clock_of_process_0_once_a_session_is_attached() -> None:
    recorder = Recorder()
    alone = recorder.started
    session = cast(Session, types.SimpleNamespace(clock_offset=1000.0))
    recorder.attach(session)
    assert recorder.session is session
    assert recorder.started == alone - 1000.0


def test_what_a_recorder_gives_out_does_not_change_it() -> None:
    recorder = Recorder()
    member = reports.make_report(2).members[1]
    recorder.add_reports({1: member})
    recorder.other_reports.clear()
    assert recorder.other_reports == {1: member}


@pytest.mark.core
def test_phases_show_in_jax_profiles(restore: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        restore()
    (file,) = tmp_path.rglob("*.trace.json.gz")
    names = {event.get("name", "") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"orbax_ext.restore.describe", "orbax_ext.restore.plan", "orbax_ext.restore.read"} <= names
