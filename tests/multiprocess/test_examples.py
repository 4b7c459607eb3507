"""The programs of examples/ on real processes: what they print when they start, and when they resume."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from tests.support import file_damage, s3_server
from tests.support.s3_proxy import FaultProxy

pytestmark = pytest.mark.once

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def job(s3_port: int, _proxy: FaultProxy) -> Iterator[lab.Cluster]:
    """4 processes x 2 devices that find the S3 server by the usual variables."""
    s3_server.make_bucket(s3_port, "examples")
    env = {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": _proxy.url, "AWS_REGION": "us-east-1"}
    with lab.Cluster(4, 2, env=env) as running:
        yield running


@pytest.mark.parametrize("name", ["train_nnx", "overlap_nnx", "train_linen", "train_s3"])
def test_a_loop_resumes_with_the_losses_of_an_undisturbed_one(job: lab.Cluster, path: str, name: str) -> None:
    checkpoints = f"s3://examples/{name}" if name == "train_s3" else path
    first, _ = run_on(job, name, checkpoints, "--steps", "12")
    again, strategies = run_on(job, name, checkpoints, "--steps", "12")
    assert [line.split()[1] for line in first] == [str(step) for step in range(1, 13)]
    assert again == first[10:]  # from step 10
    assert all(strategies)
    if name == "train_linen":
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "look.py"), path],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert re.search(r"Dense_0.*kernel.* float32 \(16, 64\)", done.stdout)
        assert re.search(r"Dense_0.*kernel.*: mean", done.stdout)


def test_a_damaged_step_is_skipped_and_made_again(job: lab.Cluster, path: str) -> None:
    (whole,), _ = run_on(job, "resume_valid", path, "--steps", "20")
    assert len(list(pathlib.Path(path).rglob("*orbax_ext_digests*.json"))) == 2
    file_damage.corrupt(f"{path}/20")
    resumed, strategies = run_on(job, "resume_valid", path, "--steps", "20")
    assert resumed == ["resumed from step 10, skipped [20]", whole]
    assert all(strategies)
    assert run_on(job, "resume_valid", path, "--steps", "20")[0] == ["resumed from step 20, skipped []", whole]


def test_a_stacked_checkpoint_goes_on_without_pmap(job: lab.Cluster, tmp_path: pathlib.Path) -> None:
    run_on(job, "from_pmap", "save", str(tmp_path / "old"))
    printed, strategies = run_on(job, "from_pmap", "train", str(tmp_path / "old"), str(tmp_path / "new"))
    assert printed == ["went on from step 100 with weights of shape (256, 64)"]
    assert all(strategies)
    weights = runpy.run_path(str(EXAMPLES / "from_pmap.py"))["WEIGHTS"]
    with ocp.StandardCheckpointer() as checkpointer:  # plain Orbax, in this process
        saved = checkpointer.restore(tmp_path / "new" / "101" / "default", {"weights": np.zeros_like(weights)})
    assert saved["weights"].dtype == weights.dtype
    assert saved["weights"].tobytes() == (weights * 2).tobytes()


def test_a_host_that_lost_its_directory_gets_the_step_from_others(job: lab.Cluster, tmp_path: pathlib.Path) -> None:
    local, checkpoints = str(tmp_path / "local"), str(tmp_path / "checkpoints")
    undisturbed, _ = run_on(job, "train_emergency", str(tmp_path / "other"), str(tmp_path / "others"), "--steps", "13")
    assert [line.split()[1] for line in undisturbed] == [str(step) for step in range(1, 14)]
    assert len({line.split()[3] for line in undisturbed}) == 13
    first, _ = run_on(job, "train_emergency", local, checkpoints, "--steps", "12")
    shutil.rmtree(f"{local}/2")
    again, strategies = run_on(job, "train_emergency", local, checkpoints, "--steps", "13")
    assert first + again == undisturbed
    assert {text for by_leaf in strategies for text in by_leaf.values()} == {"local: from the hosts that have it"}


def run_on(job: lab.Cluster, name: str, *arguments: str) -> tuple[list[str], list[dict[str, str]]]:
    """Runs an example on new processes.

    Returns the lines of process 0, and how each process restored its leaves; nothing if it did not restore.
    """
    job.stop()
    results = job.run(run_example, str(EXAMPLES / f"{name}.py"), arguments)
    assert not any(printed for printed, _ in results[1:])
    return results[0][0].splitlines(), [strategy for _, strategy in results]


# Run on the processes.


def run_example(program: str, arguments: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Runs a program as Python does, in a process that has joined already."""
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.object(jax.distributed, "initialize"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(program, run_name="__main__")
    report = orbax_ext.last_report()
    return printed.getvalue(), dict(report.strategy) if report else {}
