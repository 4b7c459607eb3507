"""`orbax-ext run` on real processes: a program that does not know orbax_ext, under plain Python and under `run`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import pytest

from orbax_ext.lab.cluster import reserved_port
from orbax_ext.report.report import RestoreReport
from tests.support import states

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "program.py"
PROCESSES = 4
LIMIT = 240.0
PLAIN = (sys.executable,)
RUN = (sys.executable, "-m", "orbax_ext", "run", "--replica-axis", "data", "--report", "restore.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    launch(path.parent, PLAIN, "save", str(path))
    return str(path)


def test_a_program_runs_unchanged_and_process_0_leaves_the_report(checkpoint: str, tmp_path: pathlib.Path) -> None:
    assert launch(tmp_path, [*RUN, "--strategy", "spread"], "plain", checkpoint) == [{}] * PROCESSES
    assert [path.parent.name for path in tmp_path.rglob("restore.json")] == ["0"]
    report = RestoreReport.from_json((tmp_path / "0" / "restore.json").read_text())
    assert (report.processes, sorted(report.members), report.leaves) == (PROCESSES, [*range(PROCESSES)], 4)
    assert set(states.strategy_names(report.strategy.values())) == {"spread"}


def test_a_program_that_makes_orbax_s_own_handler_restores_exactly(checkpoint: str, tmp_path: pathlib.Path) -> None:
    for changed in launch(tmp_path / "stock", PLAIN, "single_replica", checkpoint):
        assert (changed["mask"], changed["quantized"]) == ("int32", "int32")
        assert {"zeros", "weights"} <= changed.keys()
    assert launch(tmp_path / "ours", RUN, "single_replica", checkpoint) == [{}] * PROCESSES
    report = RestoreReport.from_json((tmp_path / "ours" / "0" / "restore.json").read_text())
    assert (report.leaves, report.error) == (4, "")


def launch(folder: pathlib.Path, command: Sequence[str], mode: str, path: str) -> list[dict[str, str]]:
    """Runs the program on all processes, each in a folder of its own; returns what each printed as its last line."""
    with reserved_port() as port:
        ended = run_all(folder, [*command, str(PROGRAM), f"127.0.0.1:{port}", str(PROCESSES)], [mode, path])
    assert [code for _, code in ended] == [3] * PROCESSES, "\n".join(err for (_, err), _ in ended)
    return [json.loads((out.splitlines() or ["{}"])[-1]) if mode != "save" else {} for (out, _), _ in ended]


def run_all(folder: pathlib.Path, before: list[str], after: list[str]) -> list[tuple[tuple[str, str], int]]:
    """Runs a command with each rank between its words; returns the output, the errors and the exit codes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    processes = []
    for rank in range(PROCESSES):
        (folder / str(rank)).mkdir(parents=True)
        words = [*before, str(rank), *after]
        processes.append(subprocess.Popen(words, cwd=folder / str(rank), env=env, stdout=-1, stderr=-1, text=True))
    try:
        return [(process.communicate(timeout=LIMIT), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
