"""The report of one process as data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.spans import Span
from tests.support import reports

REPORT = ProcessReport(
    0,
    "host",
    100.0,
    {"read": 1.0},
    (
        Span("wait", 0.0, 1.0, waited_for=2),
        Span("read", 1.0, 2.0, 0),
        Span("wait", 2.0, 2.5, waited_for=1),
        Span("wait", 3.0, 3.25, waited_for=0),
        Span("wait", 3.5, 4.5, waited_for=1),
    ),
)


def test_waits_are_by_process_without_its_own_the_longest_first() -> None:
    assert list(REPORT.waits.items()) == [(1, 1.5), (2, 1.0)]


def test_the_total_is_the_end_of_the_last_span() -> None:
    assert REPORT.total_seconds == 4.5
    assert REPORT.shortened(0).total_seconds == 0.0


def test_a_shortened_report_counts_the_spans_that_it_left_out() -> None:
    shortened = REPORT.shortened(3).shortened(2)
    assert (len(shortened.spans), shortened.spans_left_out) == (2, 3)
    assert shortened.seconds == REPORT.seconds


def test_a_report_comes_back_from_its_plain_data() -> None:
    report = reports.make_report(2).members[1]
    data = json.loads(json.dumps(report.to_dict()))
    assert ProcessReport.from_dict(data).to_dict() == data


def test_every_count_of_two_parts_is_added_up() -> None:
    counts = [field.name for field in dataclasses.fields(REPORT) if field.type == "int" and field.name != "process"]
    twos: dict[str, Any] = dict.fromkeys(counts, 2)
    threes: dict[str, Any] = dict.fromkeys(counts, 3)
    both = dataclasses.replace(REPORT, **twos).followed_by(dataclasses.replace(REPORT, **threes), 1)
    peaks = [name for name in counts if name.endswith("peak_bytes")]
    assert {name: getattr(both, name) for name in counts} == dict.fromkeys(counts, 5) | dict.fromkeys(peaks, 3)


@pytest.mark.parametrize(
    "field", sorted(set(REPORT.to_dict()) - {"bytes_unused", "bytes_again"})
)  # older reports do not have it
def test_no_field_may_be_absent(field: str) -> None:
    data = REPORT.to_dict()
    del data[field]
    with pytest.raises(KeyError, match=field):
        ProcessReport.from_dict(data)
