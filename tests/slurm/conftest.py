from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

from tests.support import slurm as slurm_lib

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_lib.Slurm]:
    """A Slurm of four nodes. Its jobs have two CPU devices in each process."""
    if reason := slurm_lib.missing():
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    with slurm_lib.running(tmp_path_factory.mktemp("slurm"), environment) as running:
        yield running


@pytest.fixture(scope="session")
def checkpoint(slurm: slurm_lib.Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that plain Orbax saved in a job. No test may write to it."""
    path = str(tmp_path_factory.mktemp("saved") / "checkpoint")
    slurm.run("srun", "-N4", *program([sys.executable], "save", path), check=False)  # its exit code is always 3
    return path


def program(python: list[str], mode: str, path: str) -> list[str]:
    """Returns the command of `tests/support/program.py`, which does not ask Slurm for its place by itself."""
    # The port is not one that JAX would choose for a job of Slurm.
    script = f'exec "$@" {ROOT}/tests/support/program.py n0:61399 $SLURM_NTASKS $SLURM_PROCID {mode} {path}'
    return ["sh", "-c", script, "sh", *python]
