"""Spans as data, and sums over them."""

from __future__ import annotations

import pytest

from orbax_ext.report.spans import Span, longest, seconds_by_phase


def test_seconds_of_reads_that_overlap_count_once() -> None:
    spans = [Span("read", 0.0, 2.0), Span("read", 1.0, 3.0), Span("read", 5.0, 6.0), Span("wait", 2.0, 2.5)]
    assert seconds_by_phase(spans) == {"read": 4.0, "wait": 0.5}


def test_the_shortest_spans_are_left_out_if_there_are_too_many() -> None:
    spans = [Span("read", 0.0, 1.0), Span("wait", 1.0, 1.1), Span("read", 1.1, 3.0), Span("wait", 3.0, 3.2)]
    assert [span.start for span in longest(spans, 3)] == [0.0, 1.1, 3.0]


@pytest.mark.parametrize(
    "span",
    [Span("plan", 0.0, 1.5), Span("read", 1.0, 2.0, 0, 100), Span("wait", 1.0, 2.0, waited_for=0, note="arrive")],
)
def test_a_span_comes_back_from_its_plain_data(span: Span) -> None:
    assert Span.from_dict(span.to_dict()) == span


def test_fields_that_are_not_set_are_not_written() -> None:
    assert Span("plan", 0.0, 1.5).to_dict() == {"phase": "plan", "start": 0.0, "end": 1.5}


def test_a_title_counts_groups_from_1() -> None:
    assert (Span("plan", 0, 1).title, Span("read", 0, 1, 0).title) == ("plan", "read group 1")
