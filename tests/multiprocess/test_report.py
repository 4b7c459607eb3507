"""Reports of restores by several processes: what process 0 learns of the others, who waited for whom, who prints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.meeting import session
from orbax_ext.report import recorder, timeline
from orbax_ext.report.report import RestoreReport, publish
from tests.support import world

LATE = 2  # the process that reads late, where one does
KNOBS = {"replica_axis": "dp", "broadcast_memory_limit_bytes": 4 << 20}


@pytest.mark.parametrize("strategy", ["single", pytest.param("spread", marks=pytest.mark.core)])
def test_process_0_has_a_report_of_all_and_the_others_of_themselves(
    cluster: lab.Cluster, saved: str, strategy: str
) -> None:
    found = [RestoreReport.from_json(text) for text in cluster.run(restore, saved, {**KNOBS, "strategy": strategy})]
    assert [sorted(each.members) for each in found] == [[0, 1, 2, 3], [1], [2], [3]]
    assert all(each.missing == [] for each in found)
    whole = found[0]
    readers = [process for process, member in whole.members.items() if member.bytes_read]
    assert readers == ([0] if strategy == "single" else [0, 1, 2, 3])
    stored = _stored_bytes()
    assert sum(member.bytes_read for member in whole.members.values()) == pytest.approx(stored, rel=0.05)
    assert sum(m.bytes_sent for m in whole.members.values()) == sum(m.bytes_received for m in whole.members.values())
    assert set(whole.strategy) == set(world.STATE)
    for process, member in whole.members.items():
        assert member.host
        assert {"describe", "plan", "wait", "compile", "connect", "read", "exchange"} <= set(member.seconds)
        exchanged = [span.group for span in member.spans if span.phase == "exchange"]
        assert exchanged == list(range(whole.groups))
        if process:  # what it knows itself is what process 0 was told
            assert [span.phase for span in found[process].own.spans] == [span.phase for span in member.spans]


def test_the_report_names_the_process_that_the_others_waited_for(cluster: lab.Cluster, saved: str) -> None:
    knobs = {**KNOBS, "strategy": "spread"}
    whole = RestoreReport.from_json(cluster.run(restore_with_one_late, saved, knobs)[0])
    for process, member in whole.members.items():
        if process != LATE:
            longest = max((span for span in member.spans if span.phase == "wait"), key=lambda span: span.seconds)
            assert longest.waited_for == LATE
            assert longest.note.startswith("read group")
    lanes = timeline.make_lanes(whole)
    path = timeline.critical_path(lanes)
    longest_step = max(path, key=lambda step: step.end - step.start)
    assert longest_step.process == LATE
    assert lanes[LATE][longest_step.span].phase == "read"


def test_clocks_that_differ_are_brought_together(cluster: lab.Cluster, saved: str) -> None:
    texts = cluster.run(restore_with_clocks_apart, saved, KNOBS)
    whole = RestoreReport.from_json(texts[0])
    started = [member.started for member in whole.members.values()]
    assert max(started) - min(started) < 30  # not 1000, nor 3000
    ends = [member.started + span.end for member in whole.members.values() for span in member.spans]
    assert max(ends) - min(started) < 60


def test_a_failed_restore_leaves_a_report_on_every_process(cluster: lab.Cluster, saved: str) -> None:
    for process, text in enumerate(cluster.run(restore_and_fail, saved, KNOBS)):
        found = RestoreReport.from_json(text)
        assert sorted(found.members) == [process]
        assert found.error.startswith("RestoreFailedError: restore failed on 1 process:")
        assert "the disk is gone" in found.error
        assert "read" in found.own.seconds


@pytest.mark.parametrize("wanted", [True, False])
def test_only_process_0_tells_how_far_the_restore_is(cluster: lab.Cluster, saved: str, wanted: bool) -> None:
    lines = cluster.run(restore_and_watch, saved, {**KNOBS, "strategy": "spread", "progress": wanted})
    assert lines[1:] == [[], [], []]
    assert bool(lines[0]) == wanted
    if wanted:
        assert any("read group" in line for line in lines[0]), lines[0]


def _stored_bytes() -> int:
    return sum(array.nbytes for array in world.host_data(world.STATE).values())


# Run on the processes.


def restore(path: str, knobs: dict[str, Any]) -> str:
    publish(None)
    assert world.restore(path, world.STATE, knobs=knobs) == []
    return _last()


def restore_with_one_late(path: str, knobs: dict[str, Any]) -> str:
    with _reading(seconds=3.0 if jax.process_index() == LATE else 0.0):
        return restore(path, knobs)


def restore_and_watch(path: str, knobs: dict[str, Any]) -> list[str]:
    from orbax_ext.report import progress

    every, progress._LOG_EVERY = progress._LOG_EVERY, 0.5
    try:
        with world.logged() as lines, _reading(seconds=3.0 if jax.process_index() == LATE else 0.0):
            restore(path, knobs)
    finally:
        progress._LOG_EVERY = every
    return [line for line in lines if " of 8." in line]


def restore_and_fail(path: str, knobs: dict[str, Any]) -> str:
    publish(None)
    try:
        with _reading(error=OSError("the disk is gone") if jax.process_index() == 0 else None):
            world.restore(path, world.STATE, knobs=knobs)
    except orbax_ext.RestoreFailedError:
        return _last()
    raise AssertionError("the restore did not fail")


def restore_with_clocks_apart(path: str, knobs: dict[str, Any]) -> str:
    class Clock:
        monotonic = staticmethod(time.monotonic)
        sleep = staticmethod(time.sleep)

        @staticmethod
        def time() -> float:
            return time.time() + 1000.0 * (jax.process_index() - 1)

    session.time = recorder.time = Clock  # type: ignore[assignment, attr-defined]
    try:
        return restore(path, knobs)
    finally:
        session.time = recorder.time = time  # type: ignore[attr-defined]


@contextlib.contextmanager
def _reading(seconds: float = 0.0, error: Exception | None = None) -> Iterator[None]:
    """Makes this process's reads slow, or fail."""
    import asyncio

    from orbax.checkpoint._src.serialization import serialization

    original = serialization.async_deserialize

    async def changed(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return await original(*args, **kwargs)

    serialization.async_deserialize = changed
    try:
        yield
    finally:
        serialization.async_deserialize = original


def _last() -> str:
    found = orbax_ext.last_report()
    assert found is not None
    return found.to_json()
