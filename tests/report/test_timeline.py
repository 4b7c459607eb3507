"""Lanes, the critical path, the processes that others waited for, and trace events."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from orbax_ext.report import timeline
from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.report import RestoreReport
from orbax_ext.report.spans import Span, seconds_by_phase
from tests.support import reports

pytestmark = pytest.mark.once


def _report(*lanes: list[Span], started: float = 0.0) -> RestoreReport:
    members = {
        process: ProcessReport(process, "host", started, seconds_by_phase(spans), tuple(spans))
        for process, spans in enumerate(lanes)
    }
    return RestoreReport(0, len(lanes), members)


def _path(report: RestoreReport) -> list[tuple[int, str, int | None]]:
    lanes = timeline.make_lanes(report)
    spans = [(step.process, lanes[step.process][step.span]) for step in timeline.critical_path(lanes)]
    return [(process, span.phase, span.group) for process, span in spans]


def test_the_critical_path_goes_to_the_process_that_came_last_to_each_meeting() -> None:
    quick = [
        Span("compile", 0.0, 1.0),
        Span("wait", 1.0, 3.0, waited_for=1, note="compile"),
        Span("read", 3.0, 7.0, 0),
        Span("wait", 7.0, 7.1, waited_for=0, note="read"),
        Span("exchange", 7.1, 8.0, 0),
    ]
    slow = [
        Span("compile", 0.0, 2.9),
        Span("wait", 2.9, 3.0, waited_for=1, note="compile"),
        Span("read", 3.0, 5.0, 0),
        Span("wait", 5.0, 7.1, waited_for=0, note="read"),
        Span("exchange", 7.1, 7.9, 0),
    ]
    assert _path(_report(quick, slow)) == [(1, "compile", None), (0, "read", 0), (0, "exchange", 0)]


def test_the_critical_path_has_the_one_of_two_parallel_spans_that_ends_last() -> None:
    spans = [
        Span("read", 0.0, 1.0, 0),
        Span("exchange", 1.0, 4.0, 0),
        Span("read", 1.0, 2.0, 1),
        Span("exchange", 4.0, 5.0, 1),
    ]
    assert _path(_report(spans)) == [(0, "read", 0), (0, "exchange", 0), (0, "exchange", 1)]


def test_a_process_that_reads_slowly_is_on_the_path_and_all_others_waited_for_it() -> None:
    report = reports.make_report(64, groups=3, slow=40)
    reads = [process for process, phase, _ in _path(report) if phase == "read"]
    assert reads == [40, 40, 40]
    wait = timeline.most_waited_for(timeline.make_lanes(report))[0]
    assert (wait.process, wait.waiters) == (40, 63)


def test_a_restore_without_spans_has_no_path() -> None:
    assert timeline.critical_path(timeline.make_lanes(_report([]))) == []


def test_a_wait_for_a_process_without_a_report_does_not_end_the_path() -> None:
    assert _path(_report([Span("read", 0.0, 1.0, 0), Span("wait", 1.0, 9.0, waited_for=5)])) == [(0, "read", 0)]


def test_a_path_through_processes_that_wait_for_each_other_ends() -> None:
    one = [Span("wait", 0.0, 2.0, waited_for=1, note="a")]
    other = [Span("wait", 0.0, 2.0, waited_for=0, note="a")]
    assert _path(_report(one, other)) == []


def test_waits_for_a_process_are_added_up_without_its_own() -> None:
    lanes = timeline.make_lanes(
        _report(
            [Span("wait", 0.0, 2.0, waited_for=2), Span("wait", 3.0, 4.0, waited_for=2)],
            [Span("wait", 1.0, 2.0, waited_for=2), Span("wait", 3.0, 3.5, waited_for=0)],
            [Span("wait", 1.9, 2.0, waited_for=2)],
        )
    )
    assert timeline.most_waited_for(lanes) == [timeline.WaitedFor(2, 4.0, 2), timeline.WaitedFor(0, 0.5, 1)]


def test_lanes_count_from_the_process_that_began_first() -> None:
    report = _report([Span("read", 0.0, 1.0)], [Span("read", 0.0, 1.0)], started=100.0)
    late = dataclasses.replace(report.members[1], started=102.5)
    lanes = timeline.make_lanes(dataclasses.replace(report, members={**report.members, 1: late}))
    assert (lanes[0][0].start, lanes[1][0].start, lanes[1][0].end) == (0.0, 2.5, 3.5)


def test_trace_events_hold_every_span_with_names_and_arrows_in_pairs() -> None:
    report = reports.make_report(8, slow=3)
    trace = json.loads(json.dumps(timeline.trace_events(report)))
    events = trace["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == sum(len(member.spans) for member in report.members.values())
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert names == {process: f"process {process} (host-0)" for process in range(8)}
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts
    assert starts.keys() == ends.keys()
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)
    assert any(event["pid"] == 3 and "critical" in event["cat"] for event in events if event["ph"] == "X")
