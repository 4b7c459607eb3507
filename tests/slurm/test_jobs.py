"""Jobs that a real Slurm starts on four nodes: check, run, a node that dies, and a training job that is requeued."""

from __future__ import annotations

import json
import pathlib
import re
import sys
import time
from collections.abc import Callable

import pytest

from orbax_ext.report.report import RestoreReport
from tests.slurm import restoring
from tests.support.slurm import ROOT, Slurm, program

CHECK = (sys.executable, "-m", "orbax_ext", "check")
LIMIT = 150.0  # seconds for a part of a job, on a busy machine
STEPS, SAVE_EVERY = 120, 15
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def test_check_joins_all_tasks_and_names_the_launcher(slurm: Slurm, checkpoint: str) -> None:
    output = slurm.run("srun", "-N4", *CHECK, checkpoint)
    verdict = [line for line in output.splitlines() if line.startswith("verdict:")]
    assert len(verdict) == 1
    assert verdict[0].startswith("verdict: OK, 4 leaves")
    assert "on 4 processes x 2 devices" in verdict[0]
    assert re.search(
        r"^  launcher   Slurm \(SLURM_JOB_ID=\d+, SLURM_STEP_NODELIST=n\[0-3\], .*process 0 of 4$", output, re.M
    )
    assert re.search(r"^  processes  4 on 4 hosts, 2 devices each$", output, re.M)


def test_check_in_a_job_but_without_srun_says_what_to_do(slurm: Slurm, checkpoint: str, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "job.out"
    command = " ".join([*CHECK, checkpoint])
    job = slurm.run("sbatch", "--parsable", "-N4", "-n4", f"--output={log}", f"--wrap={command}").strip()
    wait_until(lambda: slurm.job_state(job) in ENDED, log.read_text)
    assert slurm.job_state(job) == "FAILED"
    assert "Slurm in part" in log.read_text()
    assert "not set: SLURM_STEP_NODELIST)" in log.read_text()
    assert "start it with srun" in log.read_text()
    assert "verdict" not in log.read_text()


def test_a_program_runs_unchanged_under_run(slurm: Slurm, checkpoint: str, tmp_path: pathlib.Path) -> None:
    report_file = tmp_path / "restore.json"
    run = [sys.executable, "-m", "orbax_ext", "run", "--replica-axis", "data", "--report", str(report_file)]
    for command, exact in (([sys.executable], False), (run, True)):
        output = slurm.run("srun", "-N4", *program(command, "single_replica", checkpoint), check=False)
        changed = [json.loads(found) for found in re.findall(r"^\{.*\}$", output, re.M)]
        assert [not leaves for leaves in changed] == [exact] * 4, output
        assert exit_codes(output) == dict.fromkeys(range(4), 3)
    report = RestoreReport.from_json(report_file.read_text())
    assert (report.processes, report.leaves, report.error) == (4, 4, "")


def test_all_others_name_a_node_that_dies_during_the_restore(
    slurm: Slurm, checkpoint: str, tmp_path: pathlib.Path
) -> None:
    words = [sys.executable, "-m", "tests.slurm.restoring", checkpoint, str(tmp_path), "2"]
    log = tmp_path / "srun.out"
    to_log = ["sh", "-c", f'exec "$@" > {log} 2>&1', "sh"]  # srun itself ends only when Slurm misses the node
    slurm.popen(*to_log, "srun", "-N4", "--job-name=dying", f"--output={tmp_path}/task-%t.out", *words)
    wait_until((tmp_path / "reading").exists, log.read_text)
    slurm.kill_node("n2")
    try:
        survivors = [0, 1, 3]
        wait_until(lambda: exit_codes(log.read_text()) == dict.fromkeys(survivors, restoring.EXIT), log.read_text)
        for rank in survivors:
            message = (tmp_path / str(rank)).read_text()
            # Killed while the processes still connect to each other, some have an error of their own to report too.
            assert message.startswith(("RestoreTimeoutError", "RestoreFailedError"))
            assert "process 2 (n2)" in message
    finally:  # the tests after this one need four nodes
        slurm.run("scancel", "--name=dying", check=False)
        slurm.start_node("n2")


def test_a_training_job_that_is_killed_resumes_with_the_same_losses(slurm: Slurm, tmp_path: pathlib.Path) -> None:
    uninterrupted = Training(slurm, tmp_path / "uninterrupted")
    training = Training(slurm, tmp_path / "killed")
    training.wait_for_checkpoint(SAVE_EVERY)
    slurm.kill_task(f"{training.job}.0", "n2")
    training.wait_for_start(2)
    training.wait_for_checkpoint(training.first_steps()[1])
    slurm.run("scancel", "--signal=KILL", f"{training.job}.0")
    training.wait_for_start(3)
    training.wait_for_the_end()
    uninterrupted.wait_for_the_end()

    expected = uninterrupted.losses()
    assert sorted(expected) == list(range(1, STEPS + 1))
    losses = training.losses()  # asserts that steps that were trained again had the same losses
    assert losses == expected
    first_steps = training.first_steps()
    assert len(first_steps) == 3
    assert first_steps[0] == 1
    assert all(step % SAVE_EVERY == 1 for step in first_steps[1:])
    assert SAVE_EVERY < first_steps[1] < first_steps[2]
    report = RestoreReport.from_json(next(training.folder.glob("restore-*.json")).read_text())
    assert (report.processes, report.leaves, report.error) == (4, 4, "")


def test_a_training_job_that_is_cancelled_is_not_requeued(slurm: Slurm, tmp_path: pathlib.Path) -> None:
    training = Training(slurm, tmp_path / "cancelled")
    training.wait_for_start(1)
    slurm.run("scancel", training.job)
    wait_until(lambda: slurm.job_state(training.job) in ENDED, training.output)
    time.sleep(3)  # longer than Slurm's KillWait: what is left of the job might put it back into the queue until then
    assert slurm.job_state(training.job) == "CANCELLED"


class Training:
    """A job of examples/slurm.sbatch, with a folder of its own."""

    def __init__(self, slurm: Slurm, folder: pathlib.Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._slurm = slurm
        arguments = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        self.job = slurm.run(
            *["sbatch", "--parsable", f"--chdir={folder}", f"{ROOT}/examples/slurm.sbatch", *arguments],
            PYTHON=sys.executable,
            PROGRAM=f"{ROOT}/examples/train.py",
            CHECKPOINTS=str(folder / "checkpoints"),
        ).strip()

    def output(self) -> str:
        file = self.folder / f"train-{self.job}.out"
        return file.read_text() if file.exists() else ""

    def wait_for_checkpoint(self, step: int) -> None:
        """Waits for the checkpoint of this step, or for a later one."""
        wait_until(lambda: self.last_checkpoint() >= step, self.output)

    def last_checkpoint(self) -> int:
        paths = (self.folder / "checkpoints").glob("*")
        return max((int(path.name) for path in paths if path.name.isdigit()), default=0)

    def wait_for_start(self, number: int) -> None:
        """Waits until the job trains for the second time, for example."""
        wait_until(lambda: len(self.first_steps()) == number, self.output)

    def wait_for_the_end(self) -> None:
        wait_until(lambda: self._slurm.job_state(self.job) in ENDED, self.output)
        assert self._slurm.job_state(self.job) == "COMPLETED", self.output()

    def losses(self) -> dict[int, str]:
        losses: dict[int, str] = {}
        for step, loss in self._steps():
            assert losses.setdefault(step, loss) == loss
        return losses

    def first_steps(self) -> list[int]:
        """Returns the first step after each start of the job."""
        starts = re.split(r"\(restart \d+ of", self.output())
        return [int(steps[0]) for start in starts if (steps := re.findall(r"^step (\d+) loss", start, re.M))]

    def _steps(self) -> list[tuple[int, str]]:
        return [(int(step), loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", self.output(), re.M)]


def exit_codes(output: str) -> dict[int, int]:
    """Returns the exit code of each task that did not end with 0, from what srun printed."""
    codes = {}
    for tasks, code in re.findall(r"^srun: error: \S+ tasks? ([\d,-]+): Exited with exit code (\d+)$", output, re.M):
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            codes.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(code)))
    return codes


def wait_until(condition: Callable[[], bool], output: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {LIMIT:g} s; the output so far:\n{output()}")
        time.sleep(0.1)
