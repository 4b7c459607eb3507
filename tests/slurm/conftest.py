from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from tests.support import slurm as slurm_lib


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_lib.Slurm]:
    """A Slurm of four nodes. Its jobs have two CPU devices in each process."""
    if reason := slurm_lib.missing():
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PYTHONPATH": str(slurm_lib.ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    with slurm_lib.running(tmp_path_factory.mktemp("slurm"), environment) as running:
        yield running


@pytest.fixture(scope="session")
def checkpoint(slurm: slurm_lib.Slurm, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that plain Orbax saved in a job. No test may write to it."""
    path = str(tmp_path_factory.mktemp("saved") / "checkpoint")
    save = slurm_lib.program([sys.executable], "save", path)
    slurm.run("srun", "-N4", *save, check=False)  # its exit code is always 3
    return path
