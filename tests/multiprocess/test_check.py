"""`orbax-ext check`: one verdict, the same on all processes, under Open MPI's mpirun and on a local cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from orbax_ext import lab
from orbax_ext.cli import exits, main
from orbax_ext.cli.check import rehearsal, verdict
from orbax_ext.cli.check.rehearsal import Request
from orbax_ext.plan import MeshInfo
from orbax_ext.plan.forecast import notation
from tests.support import states
from tests.support.fault_injection import damaging

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: apt-get install openmpi-bin")


def test_a_checkpoint_that_restores_is_ok_and_measured(cluster: lab.Cluster, saved: str) -> None:
    found = cluster.run(rehearsal.rehearse, Request(saved, strategy="spread"))
    assert all(dataclasses.replace(facts, report="") == dataclasses.replace(found[0], report="") for facts in found)
    facts = found[0]
    assert facts.error == ""
    assert facts.ok
    assert facts.mesh == "(pp=1, dp=4, tp=8)"
    assert "saved on it" in facts.mesh_from
    assert {axis.name: (axis.cut > 0.9, axis.across_processes) for axis in facts.axes if axis.size > 1} == {
        "dp": (False, True),
        "tp": (True, False),
    }
    assert facts.leaves == facts.travelled == len(states.STATE)
    read = sum(told.bytes_read for told in facts.told.values())
    assert facts.stored_bytes <= read < 1.1 * facts.stored_bytes
    assert all(verdict.read_rate(told) for told in facts.told.values())
    assert all(verdict.exchange_rate(told) for told in facts.told.values())
    assert verdict.changes(facts) == []
    shown = verdict.text(facts)
    assert shown.splitlines()[-1].startswith(f"verdict: OK, {len(states.STATE)} leaves")
    assert "orbax-checkpoint" in shown
    assert facts.report
    assert all(line in shown for line in facts.report.splitlines())


@pytest.mark.parametrize("strategy", ["spread", "single", "direct"])
def test_what_plan_foresees_is_what_is_read_and_received(
    cluster: lab.Cluster, saved: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = cluster.run(rehearsal.rehearse, Request(saved, strategy=strategy))[0]
    assert main.main(["plan", saved, "--mesh", "pp=1,dp=4,tp=8", "--processes", "4", "--json"]) == exits.EXIT_OK
    foreseen = json.loads(capsys.readouterr().out)["strategies"][strategy]
    state = facts.logical_bytes
    for process, told in facts.told.items():
        assert abs(told.bytes_read - foreseen["read_by_process"][process]) < 0.1 * state  # metadata, compression
        assert told.bytes_received == foreseen["received_by_process"][process]


def test_which_axes_cross_processes_is_told(cluster: lab.Cluster, saved: str) -> None:
    rules = (notation.parse_rule("layer_*=P(tp)"), notation.parse_rule("*=P()"))
    facts = cluster.run(rehearsal.rehearse, Request(saved, mesh=notation.parse_mesh("tp=4,dp=8"), rules=rules))[0]
    assert facts.ok
    assert {axis.name: (axis.cut > 0.9, axis.across_processes) for axis in facts.axes} == {
        "tp": (True, True),
        "dp": (False, False),
    }


def test_copies_that_are_all_within_a_process_are_advised_against() -> None:
    mesh = MeshInfo(("tp", "dp"), (2, 4), (0, 0, 0, 0, 1, 1, 1, 1))
    axes = verdict.axes_against_processes(mesh, {0: "a", 1: "a"}, {"tp": 1.0})
    assert [str(axis) for axis in axes] == ["tp=2: shards, across processes", "dp=4: copies, within each process"]
    told = {process: verdict.Told("a", 4, {}) for process in (0, 1)}
    (change,) = verdict.changes(verdict.Facts("/ckpt", told, axes=axes, leaves=3))
    assert "put dp before the sharded axes" in change
    assert verdict.changes(verdict.Facts("/ckpt", told, axes=axes, leaves=3, travelled=1)) == []


def test_a_request_that_does_not_fit_is_refused_by_all(cluster: lab.Cluster, saved: str) -> None:
    small = Request(saved, mesh=notation.parse_mesh("dp=2"))
    found = {facts.error for facts in cluster.run(rehearsal.rehearse, small)}
    assert len(found) == 1
    assert "has 2 devices, but this job has 32" in found.pop()
    wrong = Request(saved, mesh=notation.parse_mesh("dp=32"), rules=(notation.parse_rule("bias=P(dp)"),))
    assert "cuts dimension 0 of size 24 into 32" in cluster.run(rehearsal.rehearse, wrong)[0].error


def test_damage_that_one_process_reads_is_everyones_verdict(cluster: lab.Cluster, saved: str, path: str) -> None:
    shutil.copytree(saved, path)
    largest = max(pathlib.Path(path).rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])
    lines = {verdict.line(facts) for facts in cluster.run(rehearsal.rehearse, Request(path, timeout=60))}
    assert len(lines) == 1
    assert lines.pop().startswith("verdict: FAILED on 4 processes x 8 devices: restore failed on ")


def test_a_path_that_one_host_does_not_see_is_everyones_verdict(cluster: lab.Cluster, saved: str) -> None:
    found = cluster.run(rehearse_elsewhere, saved, 2)
    lines = {verdict.line(facts) for facts in found}
    assert len(lines) == 1
    assert "process 2" in lines.pop()
    assert [change for change in verdict.changes(found[0]) if "every host" in change]


def test_a_process_that_does_not_come_is_named_in_time(cluster: lab.Cluster, saved: str) -> None:
    found = cluster.run(rehearse_without, saved, 1, timeout=60)
    lines = {verdict.line(facts) for facts in found if facts is not None}
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("verdict: FAILED")
    assert "process 1" in line


def test_copies_that_differ_are_the_verdict(cluster: lab.Cluster, saved: str) -> None:
    lines = {verdict.line(facts) for facts in cluster.run(rehearse_and_damage, saved, "weights", [3])}
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("verdict: FAILED")
    assert "'verify'" in line
    assert "weights" in line


def test_other_versions_on_one_process_are_the_verdict() -> None:
    usual = verdict.Told("a", 8, {"jax": "0.10.2", "numpy": "2.0"})
    facts = verdict.Facts(
        "/ckpt", {0: usual, 1: usual, 2: dataclasses.replace(usual, host="b", versions={"jax": "0.9"})}
    )
    assert not facts.ok
    assert "not all processes have the same versions" in verdict.line(facts)
    assert verdict.changes(facts) == ["install jax 0.10.2 everywhere: it is 0.9 on process 2 (b)"]


def test_a_slow_reader_is_named() -> None:
    fast = verdict.Told("a", 8, {}, bytes_read=10**9, seconds=2, phases={"read": 2})
    slow = dataclasses.replace(fast, host="c", phases={"read": 9})
    facts = verdict.Facts("/ckpt", {0: fast, 1: fast, 2: slow}, stored_bytes=3 * 10**9, leaves=1, travelled=1)
    (change,) = verdict.changes(facts)
    assert "process 2 (c): 111.1 MB/s there, 500.0 MB/s usually" in change


def test_the_command_starts_a_local_cluster(saved: str) -> None:
    done = run([*command(), saved, "--local", "2x2", "--json"])
    assert done.returncode == exits.EXIT_OK, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert len(found["processes"]) == 2
    assert "replica=4" in found["mesh"]  # of 4 devices, so that what was saved on 32 becomes copies
    assert "does not fit this mesh" in found["notes"][0]


@needs_mpirun
def test_under_mpirun_the_verdict_is_printed_once(saved: str) -> None:
    done = run([*mpirun(), "-n", "3", *command(), saved, "--mesh", "dp=3,tp=2"])
    assert done.returncode == exits.EXIT_OK, done.stderr
    assert done.stdout.count("verdict:") == 1
    assert done.stdout.startswith("check of ")  # what libraries print goes elsewhere
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"verdict: OK, {len(states.STATE)} leaves")
    assert "on 3 processes x 2 devices" in last


@needs_mpirun
def test_under_mpirun_a_failure_of_one_process_is_the_one_verdict(saved: str) -> None:
    words = [*mpirun(), "-n", "1", *command(), saved, ":", "-n", "1", *command(), f"{saved}-not-here"]
    done = run(words)
    assert done.returncode == exits.EXIT_BAD_VERDICT, done.stderr
    assert done.stdout.count("verdict:") == 1
    assert "process 1" in done.stdout.splitlines()[-1]
    assert "does not exist" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stderr


@needs_mpirun
def test_under_mpirun_a_process_that_never_comes_does_not_hold_up_the_verdict(saved: str) -> None:
    words = [*mpirun(), "-n", "1", *command(), saved, "--timeout", "2", ":", "-n", "1", "sleep", "100"]
    done = run(words)
    assert done.returncode == exits.EXIT_BAD_VERDICT, done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: FAILED: not all processes of the job came within 2 s")


def command() -> list[str]:
    return [sys.executable, "-m", "orbax_ext.cli", "check"]


def mpirun() -> list[str]:
    return [str(MPIRUN), "--allow-run-as-root", "--oversubscribe"]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)


# Run on the processes.


def rehearse_elsewhere(path: str, rank: int) -> verdict.Facts:
    return rehearsal.rehearse(Request(f"{path}-elsewhere" if jax.process_index() == rank else path, timeout=60))


def rehearse_and_damage(path: str, leaf: str, ranks: list[int]) -> verdict.Facts:
    with damaging(leaf, ranks):
        return rehearsal.rehearse(Request(path, timeout=60))


def rehearse_without(path: str, rank: int) -> verdict.Facts | None:
    return None if jax.process_index() == rank else rehearsal.rehearse(Request(path, timeout=3))
