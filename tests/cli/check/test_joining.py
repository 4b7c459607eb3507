"""How a process of `orbax-ext check` joins its job, and what it says where JAX can't."""

from __future__ import annotations

import argparse
import os
from typing import Any
from unittest import mock

import jax
import pytest

from orbax_ext.cli import exits
from orbax_ext.cli.check import joining

pytestmark = pytest.mark.once

NO_LAUNCHER = ValueError("coordinator_address should be defined.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--coordinator", "a:1"], "belong together"),
        (["--processes", "4", "--process", "0"], "belong together"),
        (["--coordinator", "a", "--processes", "4", "--process", "0"], "--coordinator is HOST:PORT"),
        (["--coordinator", "a:1", "--processes", "4", "--process", "4"], "--process is a number from 0"),
        (["--coordinator", "a:1", "--processes", "4", "--process", "0", "--local", "4x8"], "--local starts its own"),
    ],
)
def test_wrong_places_are_refused(words: list[str], message: str) -> None:
    with mock.patch.dict(os.environ, clear=True), pytest.raises(exits.UserError, match=message):
        place_of(words)


def test_a_place_is_given_completely_or_left_to_jax() -> None:
    assert place_of([]) is None
    given = place_of(["--coordinator", "a:1", "--processes", "4", "--process", "3"])
    assert given == joining.GivenPlace("a:1", 4, 3)
    with mock.patch.dict(os.environ, {"JAX_COORDINATOR_ADDRESS": "b:2"}):
        assert place_of(["--processes", "4", "--process", "0"]) == joining.GivenPlace("b:2", 4, 0)


def test_without_a_launcher_a_process_is_alone() -> None:
    assert not join({}, NO_LAUNCHER)
    assert not join({"SLURM_JOB_ID": "12"}, NO_LAUNCHER)  # a shell on a node: jax #30073


def test_a_job_of_several_processes_that_jax_does_not_see_is_refused() -> None:
    with pytest.raises(exits.UserError, match=r"Slurm in part .*: start it with srun"):
        join({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}, NO_LAUNCHER)
    with pytest.raises(exits.UserError, match=r"Kubernetes \(.*pip install jax\[k8s\]"):
        join({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "a"}, NO_LAUNCHER)


def test_an_address_alone_is_not_enough() -> None:
    with pytest.raises(exits.UserError, match="give --processes and --process"):
        join({"JAX_COORDINATOR_ADDRESS": "a:1"}, ValueError("Number of processes must be defined."))


@pytest.mark.parametrize("error", [KeyError("OMPI_COMM_WORLD_RANK"), RuntimeError("Kubernetes API Error: 403\nmore")])
def test_errors_of_jax_become_one_line_with_a_remedy(error: Exception) -> None:
    with pytest.raises(exits.UserError) as raised:
        join({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, error)
    message = str(raised.value)
    assert message.startswith(f"the processes of this job did not meet: {type(error).__name__}: ")
    assert "more" not in message
    assert "Kubernetes in part" in message
    assert "env -u KUBERNETES_SERVICE_HOST" in message


def place_of(words: list[str]) -> joining.GivenPlace | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local")
    joining.add_options(parser)
    return joining.place_of(parser.parse_args(words))


def join(environ: dict[str, str], error: Exception) -> bool:
    """Joins in this environment, where JAX raises this error."""

    def initialize(*args: Any, **kwargs: Any) -> None:
        raise error

    with mock.patch.dict(os.environ, environ, clear=True), mock.patch.object(jax.distributed, "initialize", initialize):
        return joining.join(None, 10)
