"""Reports as data and in words."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib

import pytest

from orbax_ext.report.collect import pack, unpack
from orbax_ext.report.report import RestoreReport
from tests.support import reports


def test_a_report_comes_back_from_its_json() -> None:
    report = dataclasses.replace(reports.make_report(5), error="OSError: x")
    assert RestoreReport.from_json(report.to_json()).to_json() == report.to_json()
    again = RestoreReport.from_json(report.to_json())
    assert again.members[4].waits == pytest.approx(report.members[4].waits, abs=1e-5)
    assert (again.strategy, again.error, again.groups) == (report.strategy, report.error, report.groups)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[1]", "found 'list'"),
        ("{}", "found 'nothing'"),
        ('{"orbax_ext_report": 99}', "found 99"),
        ('{"orbax_ext_report": 1, "members": [{}]}', "damaged report"),
        ('{"orbax_ext_report": 1, "members": 3}', "damaged report"),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RestoreReport.from_json(text)


def test_a_report_of_few_processes_has_a_row_for_each() -> None:
    lines = str(reports.make_report(3, slow=1)).splitlines()
    assert lines[0].startswith("restored: 3 processes: 33 leaves (32 spread, 1 direct) in 4 groups, 3.1 GB read")
    assert [line.split()[0] for line in lines[1:]] == ["process", "0", "1", "2"]
    assert "1 (" in lines[2]  # whom process 0 waited for most


def test_a_report_of_many_processes_has_the_least_the_median_and_the_most() -> None:
    lines = str(reports.make_report(300)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["process", "least", "median", "most"]


def test_a_report_says_who_told_nothing_and_what_went_wrong() -> None:
    report = reports.make_report(3)
    gone = dataclasses.replace(report, members={0: report.members[0], 2: report.members[2]})
    assert "no word from 1 processes: 1" in str(gone)
    assert str(dataclasses.replace(report, error="OSError: gone\nmore")).endswith("error: OSError: gone")


@pytest.mark.parametrize("processes", [1, 64, 512, 4096])
def test_what_processes_hand_in_is_small_however_many_they_are(processes: int) -> None:
    mine = reports.make_report(2, groups=400).members[1]
    packed = pack(mine, processes)
    assert len(packed) * processes <= max(4 << 20, len(packed))
    again = unpack(packed)
    assert again.seconds == pytest.approx(mine.seconds, abs=1e-5)
    assert len(again.spans) + again.spans_left_out == len(mine.spans)
    assert again.spans  # the longest at least


def test_a_handed_in_report_that_would_fill_the_memory_is_refused() -> None:
    bomb = base64.b85encode(zlib.compress(json.dumps({"host": "x" * (64 << 20)}).encode())).decode()
    with pytest.raises(ValueError, match="more than"):
        unpack(bomb)
