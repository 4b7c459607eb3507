"""One process of a job that restores a checkpoint of `tests/support/program.py` while a node dies.

    srun python -m tests.slurm.restoring CHECKPOINT FOLDER VICTIM

The process with the rank VICTIM creates the file FOLDER/reading when it begins to read, and reads for ever. Each other
process writes the error of its restore to FOLDER/RANK.
"""

from __future__ import annotations

import math
import os
import pathlib
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from tests.support import fault_injection, program

EXIT = 4
STALL = 6.0  # seconds
FOREVER = 1000.0  # seconds
LIMIT = 30.0  # seconds for the other processes to end


def main(path: str, folder: pathlib.Path, victim: int) -> None:
    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    manager = ocp.CheckpointManager(path, item_names=("items",))
    slow = fault_injection.on(victim, lambda: fault_injection.slow_reads(FOREVER, folder / "reading"))
    try:
        with (
            orbax_ext.registered(replica_axis="data", strategy="spread", stall_timeout=STALL, late_seconds=math.inf),
            slow,
        ):
            program.restore(manager, NamedSharding(mesh, PartitionSpec("model")), "plain")
    except orbax_ext.RestoreError as error:
        write(folder / str(jax.process_index()), f"{type(error).__name__}: {error}")
        if jax.process_index() == 0:  # has the coordination service: JAX aborts the others when it ends
            wait_for([folder / str(rank) for rank in range(jax.process_count()) if rank != victim])
            time.sleep(2)  # they end right after writing
        os._exit(EXIT)  # leaving `jax.distributed` would wait for the dead process
    sys.exit("the restore worked, although a process never ended its reads")


def write(file: pathlib.Path, text: str) -> None:
    """Writes a file that is complete as soon as it is there."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(file)


def wait_for(files: list[pathlib.Path]) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]))
