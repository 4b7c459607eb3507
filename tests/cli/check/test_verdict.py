"""The verdict of `orbax-ext check` and its advice."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from orbax_ext.cli.check import verdict
from orbax_ext.cli.check.verdict import Axis, CheckResult, ProcessResult
from orbax_ext.plan import MeshInfo

pytestmark = pytest.mark.once

VERSIONS = {"jax": "0.10.2", "numpy": "2.0"}
READER = ProcessResult("a", 8, VERSIONS, 10**9, 0, 2.0, {"read": 2.0})


def result(*processes: ProcessResult, **fields: Any) -> CheckResult:
    """A restore of 3 leaves that worked."""
    given = {"leaves": 3, "travelled": 3, "stored_bytes": 10**9 * len(processes), "logical_bytes": 10**9, **fields}
    return CheckResult("/ckpt", dict(enumerate(processes)), **given)


def test_a_restore_that_worked_is_ok() -> None:
    shown = verdict.line(result(READER, dataclasses.replace(READER, seconds=3.0)))
    assert shown == "verdict: OK, 3 leaves (1.0 GB) restored on 2 processes x 8 devices in 3.0 s, all copies exact"


def test_one_process_and_one_device_are_singular() -> None:
    alone = dataclasses.replace(READER, devices=1)
    assert "1 leaf (1.0 GB) restored on 1 process x 1 device in" in verdict.line(result(alone, leaves=1))
    assert "1 on 1 host, 1 device each" in verdict.text(result(alone))


def test_an_error_is_one_line() -> None:
    failed = result(READER, error="OSError:\n  the disk is gone")
    assert not failed.ok
    assert verdict.line(failed) == "verdict: FAILED on 1 process x 8 devices: OSError: the disk is gone"
    assert verdict.line(CheckResult("/ckpt", {}, error="no")) == "verdict: FAILED: no"


def test_other_versions_on_one_process_fail() -> None:
    facts = result(READER, READER, dataclasses.replace(READER, host="b", versions={"jax": "0.9", "numpy": "2.0"}))
    assert not facts.ok
    assert "FAILED on 3 processes x 8 devices: not all processes have the same versions" in verdict.line(facts)
    assert verdict.changes(facts) == ["install jax 0.10.2 everywhere: it is 0.9 on process 2 (b)"]
    shown = verdict.text(facts)
    assert "versions   numpy 2.0: the same on all" in shown
    assert "versions   jax DIFFERS: 0.10.2 on 2 processes, 0.9 on 1 process" in shown


def test_other_versions_of_numpy_are_only_advice() -> None:
    facts = result(READER, READER, dataclasses.replace(READER, versions={**VERSIONS, "numpy": "1.0"}))
    assert facts.ok
    assert verdict.changes(facts) == ["install numpy 2.0 everywhere: it is 1.0 on process 2 (a)"]


def test_a_process_with_other_devices_is_named() -> None:
    facts = result(READER, READER, dataclasses.replace(READER, host="b", devices=4))
    assert verdict.changes(facts) == ["process 2 (b) should have 8 devices as the others do"]
    assert "3 on 2 hosts, 4 or 8 devices each" in verdict.text(facts)


def test_one_process_is_advised_to_use_a_launcher() -> None:
    (change,) = verdict.changes(result(READER))
    assert "--local 4x8" in change


def test_a_path_that_one_host_does_not_see_is_advised_to_be_shared() -> None:
    facts = result(READER, READER, error="restore failed on 1 of 2: NotACheckpointError: /ckpt does not exist")
    assert verdict.changes(facts) == ["make /ckpt readable from every host, under the same path"]


def test_the_axes_show_where_copies_are() -> None:
    mesh = MeshInfo(("tp", "dp"), (2, 4), (0, 0, 0, 0, 1, 1, 1, 1))
    axes = verdict.axes_of(mesh, {0: "a", 1: "a"}, {"tp": 1.0})
    assert [str(axis) for axis in axes] == ["tp=2: shards, across processes", "dp=4: copies, within each process"]
    axes = verdict.axes_of(mesh, {0: "a", 1: "b"}, {"tp": 0.5})
    assert str(axes[0]) == "tp=2: shards of 50% of the bytes, copies of the rest, across hosts"


def test_copies_that_are_all_within_a_process_are_advised_against() -> None:
    axes = (Axis("tp", 2, 1.0, True, False), Axis("dp", 4, 0.0, False, False))
    (change,) = verdict.changes(result(READER, READER, axes=axes, travelled=0))
    assert "put dp before the sharded axes" in change
    assert verdict.changes(result(READER, READER, axes=axes, travelled=1)) == []


def test_a_mesh_without_copies_is_explained() -> None:
    axes = (Axis("tp", 8, 1.0, True, True), Axis("pp", 1, 0.0, False, False))
    (change,) = verdict.changes(result(READER, READER, axes=axes, travelled=0))
    assert change.startswith("nothing has copies on this mesh")


def test_reading_more_than_is_stored_is_advised_against() -> None:
    (change,) = verdict.changes(result(READER, READER, stored_bytes=10**9))
    assert change == "2.0 times the stored bytes were read: `orbax-ext plan` shows which leaves are to blame"


def test_slow_storage_is_named() -> None:
    slow = dataclasses.replace(READER, host="c", phases={"read": 9})
    (change,) = verdict.changes(result(READER, READER, slow))
    assert change == "look at the storage of process 2 (c): 111.1 MB/s there, 500.0 MB/s usually"
    (change,) = verdict.changes(result(slow, READER))  # of two, the other one is usual
    assert change == "look at the storage of process 0 (c): 111.1 MB/s there, 500.0 MB/s usually"


def test_storage_of_a_process_is_named_that_others_read_for() -> None:
    late = READER.plus(
        {"bytes_read": 0, "bytes_received": 0, "seconds": 1.0, "phases": {}, "taken_over": ["late", "late"]}
    )
    (change,) = verdict.changes(result(READER, dataclasses.replace(late, host="c"), READER))
    assert change == "look at the storage of process 1 (c): others read 2 groups in its place (late)"


def test_short_reads_are_not_called_slow() -> None:
    fast = dataclasses.replace(READER, phases={"read": 0.1})
    assert verdict.changes(result(fast, fast, dataclasses.replace(READER, phases={"read": 0.9}))) == []


def test_rates_are_unknown_where_nothing_moved() -> None:
    idle = ProcessResult("a", 8, VERSIONS)
    assert (idle.read_rate, idle.exchange_rate) == (None, None)
    assert "exchange   none: every process read what it needs" in verdict.text(result(READER, idle))


def test_the_text_shows_rates_of_storage_and_exchange() -> None:
    other = ProcessResult("a", 8, VERSIONS, 0, 10**9, 2.0, {"exchange": 0.5})
    shown = verdict.text(result(READER, other, mesh="(dp=2, tp=8)", mesh_from="--mesh", notes=("a note",)))
    assert "mesh       (dp=2, tp=8), from --mesh" in shown
    assert "storage    1.0 GB read (0.50 times what is stored) by 1 process, 500.0 MB/s to 500.0 MB/s each" in shown
    assert "exchange   3 leaves, at least 2.0 GB/s into each process" in shown
    assert "note       a note" in shown


def test_measurements_of_several_items_add_up() -> None:
    measured = {"bytes_read": 5, "bytes_received": 7, "seconds": 1.5, "phases": {"read": 1.0, "exchange": 0.5}}
    twice = ProcessResult("a", 8, VERSIONS).plus(measured).plus({**measured, "phases": {"read": 1.0, "plan": 0.25}})
    assert (twice.bytes_read, twice.bytes_received, twice.seconds) == (10, 14, 3.0)
    assert twice.phases == {"read": 2.0, "exchange": 0.5, "plan": 0.25}


def test_json_has_everything() -> None:
    data = json.loads(json.dumps(verdict.data(result(READER, axes=(Axis("dp", 4, 0.0, True, True),)))))
    assert data["ok"]
    assert data["verdict"].startswith("verdict: OK")
    assert data["processes"]["0"]["read_rate"] == 5e8
    assert data["processes"]["0"]["exchange_rate"] is None
    assert data["axes"] == [{"name": "dp", "size": 4, "cut": 0.0, "across_processes": True, "across_hosts": True}]
    assert data["to_change"] == verdict.changes(result(READER))
