"""Tables and lines of a report."""

from __future__ import annotations

import dataclasses

from orbax_ext.report.spans import Span, seconds_by_phase
from orbax_ext.report.tables import ProcessTable, direct_reasons, names_by_value
from tests.support import reports


def test_a_report_of_few_processes_has_a_row_for_each() -> None:
    lines = str(reports.make_report(3, slow=1)).splitlines()
    assert lines[0].startswith("restored: 3 processes: 33 leaves (32 spread, 1 direct) in 4 groups, 3.1 GB read")
    assert [line.split()[0] for line in lines[1:]] == ["process", "-------", "0", "1", "2"]
    assert "1 (" in lines[3]  # the process for which process 0 waited most


def test_a_report_of_many_processes_has_the_least_the_median_and_the_most() -> None:
    lines = str(reports.make_report(300)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["process", "-------", "least", "median", "most"]


def test_least_median_and_most_are_of_each_column() -> None:
    members = [
        dataclasses.replace(member, bytes_read=1_000_000 * process, requests=process)
        for process, member in reports.make_report(21).members.items()
    ]
    head, _, *rows = [line.split("  ") for line in str(ProcessTable(members)).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (head, *rows)]
    bytes_read, requests = cells[0].index("bytes read"), cells[0].index("requests")
    assert [row[bytes_read] for row in cells[1:]] == ["0 B", "10.0 MB", "20.0 MB"]
    assert [row[requests] for row in cells[1:]] == ["0", "10", "20"]


def test_phases_that_no_process_had_are_left_out() -> None:
    head = ProcessTable(reports.make_report(2).members.values()).head
    assert head[:5] == ["process", "read s", "exchange s", "wait s", "compile s"]
    assert head[5] == "total s"
    assert head[-1] == "waited most for"


def test_groups_that_are_read_directly_have_a_column() -> None:
    first, *others = reports.make_report(2).members.values()
    spans = (*first.spans, Span("read directly", 0.0, 1.25, 3, 1000))
    report = dataclasses.replace(first, spans=spans, seconds=seconds_by_phase(spans))
    head, _, *rows = [line.split("  ") for line in str(ProcessTable([report, *others])).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (head, *rows)]
    at = cells[0].index("read directly s")
    assert [row[at] for row in cells] == ["read directly s", "1.25", "0.00"]


def test_rows_are_in_the_order_of_processes() -> None:
    members = reports.make_report(4).members
    lines = str(ProcessTable(members[process] for process in (2, 0, 3, 1))).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "3"]


def test_a_process_that_waited_for_nobody_has_a_dash() -> None:
    report = reports.make_report(1)
    assert ProcessTable(report.members.values()).row(report.own)[-1] == "-"


def test_names_are_grouped_by_value_in_their_order() -> None:
    assert names_by_value({"a": "x", "b": "y", "c": "x"}) == {"x": ["a", "c"], "y": ["b"]}


def test_reasons_for_direct_reads_name_a_few_leaves_each() -> None:
    reasons = {f"layer_{number}": "it is small" for number in range(5)} | {"rng": "it is a typed PRNG key"}
    assert direct_reasons(reasons) == (
        "layer_0, layer_1, layer_2 and 2 more because it is small; rng because it is a typed PRNG key"
    )
