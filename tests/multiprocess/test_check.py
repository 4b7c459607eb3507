"""`orbax-ext check` on a local cluster and under Open MPI's mpirun: one verdict, the same on all processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent import futures
from unittest import mock

import jax
import pytest

from orbax_ext import lab
from orbax_ext.cli import exits, main
from orbax_ext.cli.check import rehearsal, verdict
from orbax_ext.cli.check.target import CheckRequest
from orbax_ext.cli.check.verdict import CheckResult
from orbax_ext.lab.cluster import reserved_port
from orbax_ext.options import Strategy
from orbax_ext.plan.forecast import notation
from orbax_ext.registration import pytree_handler
from tests.support import states
from tests.support.fault_injection import damaging

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: apt-get install openmpi-bin")


def test_a_checkpoint_that_restores_is_ok_and_measured(cluster: lab.Cluster, saved: str) -> None:
    results = cluster.run(rehearse_without_take_overs, CheckRequest(saved, strategy="spread"))
    assert all(dataclasses.replace(other, report="") == dataclasses.replace(results[0], report="") for other in results)
    result = results[0]
    assert result.error == ""
    assert result.ok
    assert result.mesh == "(pp=1, dp=4, tp=8)"
    assert "saved on it" in result.mesh_from
    assert {axis.name: (axis.cut > 0.9, axis.across_processes) for axis in result.axes if axis.size > 1} == {
        "dp": (False, True),
        "tp": (True, False),
    }
    assert result.leaves == result.travelled == len(states.STATE)
    assert result.stored_bytes <= result.bytes_read < 1.1 * result.stored_bytes
    assert all(process.read_rate for process in result.processes.values())
    assert all(process.exchange_rate for process in result.processes.values())
    assert verdict.changes(result) == []
    shown = verdict.text(result)
    assert shown.splitlines()[-1].startswith(f"verdict: OK, {len(states.STATE)} leaves")
    assert "orbax-checkpoint" in shown
    assert result.report
    assert all(line in shown for line in result.report.splitlines())


@pytest.mark.parametrize("strategy", ["spread", "single", "direct"])
def test_what_plan_forecasts_is_what_is_read_and_received(
    cluster: lab.Cluster, saved: str, strategy: Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    result = cluster.run(rehearse_without_take_overs, CheckRequest(saved, strategy=strategy))[0]
    assert main.main(["plan", saved, "--mesh", "pp=1,dp=4,tp=8", "--processes", "4", "--json"]) == exits.EXIT_OK
    forecast = json.loads(capsys.readouterr().out)["strategies"][strategy]
    state = result.logical_bytes
    for number, process in result.processes.items():
        assert abs(process.bytes_read - forecast["read_by_process"][number]) < 0.1 * state  # metadata, compression
        assert process.bytes_received == forecast["received_by_process"][number]


def test_the_axes_that_cross_processes_are_shown(cluster: lab.Cluster, saved: str) -> None:
    rules = (notation.parse_rule("layer_*=P(tp)"), notation.parse_rule("*=P()"))
    request = CheckRequest(saved, mesh=notation.parse_mesh("tp=4,dp=8"), rules=rules)
    result = cluster.run(rehearsal.rehearse, request)[0]
    assert result.ok
    assert {axis.name: (axis.cut > 0.9, axis.across_processes) for axis in result.axes} == {
        "tp": (True, True),
        "dp": (False, False),
    }


def test_all_processes_refuse_a_mesh_or_spec_that_does_not_fit(cluster: lab.Cluster, saved: str) -> None:
    small = CheckRequest(saved, mesh=notation.parse_mesh("dp=2"))
    refusals = {result.error for result in cluster.run(rehearsal.rehearse, small)}
    assert len(refusals) == 1
    assert "has 2 devices, but this job has 32" in refusals.pop()
    wrong = CheckRequest(saved, mesh=notation.parse_mesh("dp=32"), rules=(notation.parse_rule("bias=P(dp)"),))
    assert "cuts dimension 0 of size 24 into 32" in cluster.run(rehearsal.rehearse, wrong)[0].error


def test_all_processes_report_damage_that_one_reads(cluster: lab.Cluster, saved: str, path: str) -> None:
    shutil.copytree(saved, path)
    largest = max(pathlib.Path(path).rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])
    lines = {verdict.line(result) for result in cluster.run(rehearsal.rehearse, CheckRequest(path, timeout=60))}
    assert len(lines) == 1
    assert lines.pop().startswith("verdict: FAILED on 4 processes x 8 devices: restore failed on ")


def test_all_processes_report_a_path_that_one_does_not_see(cluster: lab.Cluster, saved: str) -> None:
    results = cluster.run(rehearse_elsewhere, saved, 2)
    lines = {verdict.line(result) for result in results}
    assert len(lines) == 1
    assert "process 2" in lines.pop()
    assert [change for change in verdict.changes(results[0]) if "every host" in change]


def test_a_missing_process_is_named_within_the_limit(cluster: lab.Cluster, saved: str) -> None:
    results = cluster.run(rehearse_without, saved, 1, timeout=60)
    lines = {verdict.line(result) for result in results if result is not None}
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("verdict: FAILED")
    assert "process 1" in line


def test_copies_that_differ_fail_the_check(cluster: lab.Cluster, saved: str) -> None:
    lines = {verdict.line(result) for result in cluster.run(rehearse_and_damage, saved, "weights", [3])}
    assert len(lines) == 1
    line = lines.pop()
    assert line.startswith("verdict: FAILED")
    assert "'verify'" in line
    assert "weights" in line


def test_the_command_starts_a_local_cluster(saved: str) -> None:
    done = run([*command(), saved, "--local", "2x2", "--json"])
    assert done.returncode == exits.EXIT_OK, done.stderr
    data = json.loads(done.stdout)
    assert data["ok"]
    assert len(data["processes"]) == 2
    assert "replica=4" in data["mesh"]  # 4 devices, so that the leaves saved on 32 become copies
    assert "does not fit this mesh" in data["notes"][0]


def test_processes_that_no_launcher_started_are_given_their_places(saved: str) -> None:
    with reserved_port() as port, futures.ThreadPoolExecutor() as pool:
        place = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process"]
        done = list(pool.map(run, [[*command(), saved, *place, rank] for rank in "01"]))
    assert [process.returncode for process in done] == [exits.EXIT_OK] * 2, done[0].stderr
    assert "\n  launcher   process 0 of 2, from --processes and --process\n" in done[0].stdout
    assert "on 2 processes x 2 devices" in done[0].stdout
    assert done[1].stdout == ""


def test_a_shell_on_a_node_of_slurm_is_checked_alone_with_advice(saved: str) -> None:
    done = run(["env", "SLURM_JOB_ID=12", *command(), saved])
    assert done.returncode == exits.EXIT_OK, done.stderr
    assert "\n  launcher   Slurm in part (SLURM_JOB_ID=12; not set: SLURM_STEP_NODELIST, " in done.stdout
    assert "start it with srun" in done.stdout
    assert "on 1 process x 2 devices" in done.stdout


@needs_mpirun
def test_under_mpirun_the_verdict_is_printed_once(saved: str) -> None:
    done = run([*mpirun(), "-n", "3", *command(), saved, "--mesh", "dp=3,tp=2"])
    assert done.returncode == exits.EXIT_OK, done.stderr
    assert done.stdout.count("verdict:") == 1
    assert done.stdout.startswith("check of ")  # libraries print to standard error
    assert "\n  launcher   Open MPI (OMPI_MCA_orte_hnp_uri=" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"verdict: OK, {len(states.STATE)} leaves")
    assert "on 3 processes x 2 devices" in last


@needs_mpirun
def test_under_mpirun_one_verdict_names_the_failed_process(saved: str) -> None:
    words = [*mpirun(), "-n", "1", *command(), saved, ":", "-n", "1", *command(), f"{saved}-not-here"]
    done = run(words)
    assert done.returncode == exits.EXIT_BAD_VERDICT, done.stderr
    assert done.stdout.count("verdict:") == 1
    assert "process 1" in done.stdout.splitlines()[-1]
    assert "does not exist" in done.stdout.splitlines()[-1]
    assert "Traceback" not in done.stderr


@needs_mpirun
def test_under_mpirun_the_verdict_does_not_wait_for_a_missing_process(saved: str) -> None:
    words = [*mpirun(), "-n", "1", *command(), saved, "--timeout", "2", ":", "-n", "1", "sleep", "100"]
    done = run(words)
    assert done.returncode == exits.EXIT_BAD_VERDICT, done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: FAILED: not all processes of the job came within 2 s")


def test_without_process_0_the_others_say_why_they_end(tmp_path: pathlib.Path) -> None:
    with reserved_port() as port:  # where nobody listens
        place = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", "1"]
        done = run([*command(), str(tmp_path), *place, "--timeout", "2"])
    assert done.returncode == exits.EXIT_BAD_VERDICT, done.stderr
    assert done.stdout == ""
    assert "orbax-ext check, process 1: not all processes of the job came within 2 s" in done.stderr


def command() -> list[str]:
    return [sys.executable, "-m", "orbax_ext.cli", "check"]


def mpirun() -> list[str]:
    return [str(MPIRUN), "--allow-run-as-root", "--oversubscribe"]


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)


# Run on the processes.


def rehearse_without_take_overs(request: CheckRequest) -> CheckResult:
    """Rehearses a restore in which nobody reads a second time what another process reads slowly."""
    patient = functools.partial(pytree_handler, late_seconds=math.inf)
    with mock.patch.object(rehearsal, "pytree_handler", patient):
        return rehearsal.rehearse(request)


def rehearse_elsewhere(path: str, rank: int) -> CheckResult:
    return rehearsal.rehearse(CheckRequest(f"{path}-elsewhere" if jax.process_index() == rank else path, timeout=60))


def rehearse_and_damage(path: str, leaf: str, ranks: list[int]) -> CheckResult:
    with damaging(leaf, ranks):
        return rehearsal.rehearse(CheckRequest(path, timeout=60))


def rehearse_without(path: str, rank: int) -> CheckResult | None:
    return None if jax.process_index() == rank else rehearsal.rehearse(CheckRequest(path, timeout=3))
