"""Reports of restores by several processes: process 0 has all members, waits name the late process, one prints."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any
from unittest import mock

import jax
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.meeting import driver
from orbax_ext.report import progress, recorder, timeline
from orbax_ext.report.report import RestoreReport, publish
from tests.support import fault_injection, states

LATE = 2  # the process that reads late in some tests
# A process that is late on purpose is waited for.
KNOBS = {"replica_axis": "dp", "broadcast_memory_limit_bytes": 4 << 20, "late_seconds": math.inf}


@pytest.mark.parametrize("strategy", ["single", pytest.param("spread", marks=pytest.mark.core)])
def test_process_0_reports_on_all_and_the_others_on_themselves(cluster: lab.Cluster, saved: str, strategy: str) -> None:
    reports = [RestoreReport.from_json(text) for text in cluster.run(restore, saved, {**KNOBS, "strategy": strategy})]
    assert [sorted(report.members) for report in reports] == [[0, 1, 2, 3], [1], [2], [3]]
    assert all(report.missing == [] for report in reports)
    whole = reports[0]
    readers = [process for process, member in whole.members.items() if member.bytes_read]
    assert readers == ([0] if strategy == "single" else [0, 1, 2, 3])
    stored = _stored_bytes()
    assert sum(member.bytes_read for member in whole.members.values()) == pytest.approx(stored, rel=0.05)
    assert sum(m.bytes_sent for m in whole.members.values()) == sum(m.bytes_received for m in whole.members.values())
    assert set(whole.strategy) == set(states.STATE)
    for process, member in whole.members.items():
        assert member.host
        assert {"describe", "plan", "wait", "compile", "connect", "read", "exchange"} <= set(member.seconds)
        exchanged = [span.group for span in member.spans if span.phase == "exchange"]
        assert exchanged == list(range(whole.groups))
        if process:  # its own report has the spans that it sent to process 0
            assert [span.phase for span in reports[process].own.spans] == [span.phase for span in member.spans]


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


def test_different_clocks_are_aligned(cluster: lab.Cluster, saved: str) -> None:
    texts = cluster.run(restore_with_clocks_apart, saved, KNOBS)
    whole = RestoreReport.from_json(texts[0])
    started = [member.started for member in whole.members.values()]
    assert max(started) - min(started) < 30  # not 1000, nor 3000
    ends = [member.started + span.end for member in whole.members.values() for span in member.spans]
    assert max(ends) - min(started) < 60


def test_a_failed_restore_leaves_a_report_on_every_process(cluster: lab.Cluster, saved: str) -> None:
    for process, text in enumerate(cluster.run(restore_and_fail, saved, KNOBS)):
        report = RestoreReport.from_json(text)
        assert sorted(report.members) == [process]
        assert report.error.startswith("RestoreFailedError: restore failed on 1 process:")
        assert "the disk is gone" in report.error
        assert "read" in report.own.seconds


@pytest.mark.parametrize("wanted", [True, False])
def test_only_process_0_logs_progress(cluster: lab.Cluster, saved: str, wanted: bool) -> None:
    lines = cluster.run(restore_and_watch, saved, {**KNOBS, "strategy": "spread", "progress": wanted})
    assert lines[1:] == [[], [], []]
    assert bool(lines[0]) == wanted
    if wanted:
        assert any("read group" in line for line in lines[0]), lines[0]


def _stored_bytes() -> int:
    return sum(array.nbytes for array in states.host_data(states.STATE).values())


# Run on the processes.


def restore(path: str, knobs: dict[str, Any]) -> str:
    return states.restore_exactly(path, knobs).to_json()


def restore_with_one_late(path: str, knobs: dict[str, Any]) -> str:
    with _late_reads():
        return restore(path, knobs)


def restore_and_watch(path: str, knobs: dict[str, Any]) -> list[str]:
    with mock.patch.object(progress, "_LOG_EVERY", 0.5), states.logged() as lines, _late_reads():
        restore(path, knobs)
    return [line for line in lines if " of 8." in line]


def restore_and_fail(path: str, knobs: dict[str, Any]) -> str:
    publish(None)
    try:
        with fault_injection.on(0, fault_injection.read_error):
            states.restore(path, states.STATE, knobs={**knobs, "strict_readers": True})
    except orbax_ext.RestoreFailedError:
        report = orbax_ext.last_report()
        assert report is not None
        return report.to_json()
    raise AssertionError("the restore did not fail")


def restore_with_clocks_apart(path: str, knobs: dict[str, Any]) -> str:
    class Clock:
        monotonic = staticmethod(time.monotonic)
        sleep = staticmethod(time.sleep)

        @staticmethod
        def time() -> float:
            return time.time() + 1000.0 * (jax.process_index() - 1)

    with mock.patch.object(driver, "time", Clock), mock.patch.object(recorder, "time", Clock):
        return restore(path, knobs)


def _late_reads() -> contextlib.AbstractContextManager[None]:
    return fault_injection.on(LATE, lambda: fault_injection.slow_reads(3.0))
