"""What is worked out from a report's spans: the critical path, who was waited for, trace events."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from orbax_ext.report import timeline
from orbax_ext.report.report import ProcessReport, RestoreReport
from orbax_ext.report.spans import Span, longest, seconds_by_phase
from tests.support import reports

pytestmark = pytest.mark.once


def _report(*lanes: list[Span], started: float = 0.0) -> RestoreReport:
    members = {
        process: ProcessReport(process, "host", started, seconds_by_phase(spans), tuple(spans))
        for process, spans in enumerate(lanes)
    }
    return RestoreReport(0, len(lanes), members)


def _path(report: RestoreReport) -> list[tuple[int, str, int | None]]:
    lanes = timeline.lanes(report)
    spans = [(step.process, lanes[step.process][step.span]) for step in timeline.critical_path(lanes)]
    return [(process, span.phase, span.group) for process, span in spans]


def test_the_critical_path_goes_to_whoever_came_last_to_each_meeting() -> None:
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


def test_of_what_goes_on_at_the_same_time_the_critical_path_has_what_ends_last() -> None:
    spans = [
        Span("read", 0.0, 1.0, 0),
        Span("exchange", 1.0, 4.0, 0),
        Span("read", 1.0, 2.0, 1),
        Span("exchange", 4.0, 5.0, 1),
    ]
    assert _path(_report(spans)) == [(0, "read", 0), (0, "exchange", 0), (0, "exchange", 1)]


def test_a_process_that_reads_slowly_is_on_the_path_and_blamed_by_all_others() -> None:
    report = reports.make_report(64, groups=3, slow=40)
    reads = [process for process, phase, _ in _path(report) if phase == "read"]
    assert reads == [40, 40, 40]
    blame = timeline.blames(timeline.lanes(report))[0]
    assert (blame.process, blame.waiters) == (40, 63)


def test_a_restore_without_spans_has_no_path() -> None:
    assert timeline.critical_path(timeline.lanes(_report([]))) == []


def test_a_wait_for_a_process_that_told_nothing_does_not_stop_the_path() -> None:
    assert _path(_report([Span("read", 0.0, 1.0, 0), Span("wait", 1.0, 9.0, waited_for=5)])) == [(0, "read", 0)]


def test_lanes_count_from_the_process_that_began_first() -> None:
    report = _report([Span("read", 0.0, 1.0)], [Span("read", 0.0, 1.0)], started=100.0)
    late = dataclasses.replace(report.members[1], started=102.5)
    lanes = timeline.lanes(dataclasses.replace(report, members={**report.members, 1: late}))
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


def test_seconds_of_reads_that_overlap_count_once() -> None:
    spans = [Span("read", 0.0, 2.0), Span("read", 1.0, 3.0), Span("read", 5.0, 6.0), Span("wait", 2.0, 2.5)]
    assert seconds_by_phase(spans) == {"read": 4.0, "wait": 0.5}


def test_where_there_are_too_many_spans_the_shortest_are_left_out() -> None:
    spans = [Span("read", 0.0, 1.0), Span("wait", 1.0, 1.1), Span("read", 1.1, 3.0), Span("wait", 3.0, 3.2)]
    assert [span.start for span in longest(spans, 3)] == [0.0, 1.1, 3.0]
