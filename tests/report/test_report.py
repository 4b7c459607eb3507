"""Reports as JSON and as text."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from orbax_ext.report.report import RestoreReport
from orbax_ext.report.take_over import TakeOver
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
        ("[" * 100_000, "not JSON"),
        ("[1]", "found 'list'"),
        ("{}", "found 'nothing'"),
        ('{"orbax_ext_report": 99}', "found 99"),
        ('{"orbax_ext_report": 1, "members": [{}]}', "damaged report"),
        ('{"orbax_ext_report": 1, "members": 3}', "damaged report"),
        ('{"orbax_ext_report": 1, "members": [], "process": Infinity}', "damaged report"),
    ],
    ids=lambda value: value[:60],
)
def test_text_that_is_no_report_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RestoreReport.from_json(text)


def test_the_headline_has_outcome_bytes_and_time() -> None:
    report = reports.make_report(3, slow=1)
    assert report.headline().startswith(
        "restored: 3 processes: 33 leaves (32 spread, 1 direct) in 4 groups, 3.1 GB read"
    )
    assert "; describe " in report.headline()
    assert "S3" not in report.headline()


def test_two_parts_of_a_restore_make_one_report() -> None:
    first, later = reports.make_report(3), reports.make_report(3, slow=1)
    names = sorted(later.strategy)
    first = dataclasses.replace(first, strategy={"held": "local: every host has it", names[0]: "storage"})
    del later.members[2]
    both = first.followed_by(dataclasses.replace(later, error="OSError: x"))
    assert (sorted(both.members), both.groups, both.error) == ([0, 1], first.groups + later.groups, "OSError: x")
    assert both.strategy == {**first.strategy, **later.strategy, names[0]: f"storage; {later.strategy[names[0]]}"}
    one, other, together = first.members[1], later.members[1], both.members[1]
    assert together.bytes_read == one.bytes_read + other.bytes_read
    assert together.host_peak_bytes == max(one.host_peak_bytes, other.host_peak_bytes)
    assert together.seconds["read"] == one.seconds["read"] + other.seconds["read"]
    assert together.total_seconds == pytest.approx(one.total_seconds + other.total_seconds)
    assert {span.group for span in together.spans} == {None, *range(first.groups + later.groups)}
    assert RestoreReport.from_json(both.to_json()).to_json() == both.to_json()


def test_what_others_read_in_either_part_of_a_restore_is_in_its_report() -> None:
    first = dataclasses.replace(
        reports.make_report(2, groups=3), take_overs=(TakeOver(2, 1, "a", "late"),), through_orbax=["x", "y"]
    )
    later = dataclasses.replace(
        reports.make_report(2), take_overs=(TakeOver(0, 1, "a", "OSError: x"),), through_orbax=["z", "y"]
    )
    both = first.followed_by(later)
    assert both.take_overs == (TakeOver(2, 1, "a", "late"), TakeOver(3, 1, "a", "OSError: x"))
    assert both.through_orbax == ["x", "y", "z"]


def test_the_headline_of_one_process_says_which() -> None:
    report = reports.make_report(3)
    own = dataclasses.replace(report, process=1, members={1: report.members[1]}, leaves=1, groups=1, strategy={})
    assert own.headline().startswith("restored: process 1 of 3: 1 leaf (nothing planned) in 1 group, 1.0 GB read")


def test_the_headline_of_a_restore_from_s3_has_requests_and_bytes() -> None:
    report = reports.make_report(1)
    counts = {"metadata_requests": 3, "metadata_bytes": 500, "array_requests": 4, "array_bytes": 1_500}
    member = dataclasses.replace(report.own, s3=counts)
    assert dataclasses.replace(report, members={0: member}).headline().endswith("; S3: 7 requests, 2.0 kB")


def test_the_text_names_processes_without_a_report_and_the_error() -> None:
    report = reports.make_report(3)
    incomplete = dataclasses.replace(report, members={0: report.members[0], 2: report.members[2]})
    assert str(incomplete).endswith("\nno report from 1 process: 1")
    assert str(dataclasses.replace(report, error="OSError: gone\nmore")).endswith("error: OSError: gone")


def test_a_list_of_missing_processes_is_short() -> None:
    report = reports.make_report(40)
    alone = dataclasses.replace(report, members={0: report.members[0]})
    assert str(alone).endswith("no report from 39 processes: " + ", ".join(map(str, range(1, 17))) + " and 23 more")


def test_bytes_that_the_state_did_not_need_have_a_line() -> None:
    report = reports.make_report(3)
    assert "also read" not in str(report)
    members = {
        process: dataclasses.replace(member, bytes_again=1_000_000) for process, member in report.members.items()
    }
    again = dataclasses.replace(report, members=members)
    assert str(again).endswith("\nalso read: 3.0 MB in place of others or to measure storage")
    members[1] = dataclasses.replace(members[1], bytes_unused=5_000)
    assert str(dataclasses.replace(report, members=members)).endswith(
        "\nalso read: 5.0 kB for exchanges that were not held, 3.0 MB in place of others or to measure storage"
    )


@pytest.mark.once
def test_a_report_is_rendered_without_jax(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "restore.json"
    file.write_text(reports.make_report(4, slow=2).to_json())
    script = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'orbax', 'tensorstore'): sys.modules[name] = None  # importing it fails\n"
        "from orbax_ext.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    outputs = ["--html", str(tmp_path / "page.html"), "--trace", str(tmp_path / "trace.json")]
    command = [sys.executable, "-c", script, "report", str(file), *outputs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("restored: 4 processes")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert (tmp_path / "trace.json").stat().st_size > 1000


def test_take_overs_are_in_the_json_and_in_the_text() -> None:
    late, denied = TakeOver(0, 1, "host-a", "late"), TakeOver(2, 3, "host-b", "PermissionError: no")
    report = dataclasses.replace(reports.make_report(4), take_overs=(late, denied))
    assert RestoreReport.from_json(report.to_json()).take_overs == (late, denied)
    lines = str(report).splitlines()
    assert "others read group 1 in place of process 1 (host-a): late" in lines
    assert "others read group 3 in place of process 3 (host-b): PermissionError: no" in lines
    many = str(dataclasses.replace(report, take_overs=(late,) * 20)).splitlines()
    assert many[-1] == "and 12 more in place of others"
    assert "in place of" not in str(reports.make_report(4))
