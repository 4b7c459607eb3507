"""Scenarios for the stock emergency manager. Run on each of 4 processes x 4 devices; each process is a replica."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from jax.sharding import Mesh

from tests.fork import scenarios


def values() -> scenarios.Tree:
    """Returns arrays that a sum over replicas changes. int4 is left out: stock Orbax can't send it at all."""
    return {name: value for name, value in scenarios.patterns().items() if name != "int4"}


def save(root: str) -> None:
    """Saves step 1: process 0 to persistent storage, the others each to a directory of their own."""
    tree = {name: scenarios.place(value, mesh()) for name, value in values().items()}
    with manager(root) as running:
        running.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
        running.wait_until_finished()


def restore(root: str, *, set_mesh: bool = False) -> dict[str, str]:
    with manager(root) as running, jax.set_mesh(mesh()) if set_mesh else contextlib.nullcontext():
        return scenarios.differences(running.restore(1).state, values())


def restore_with_listing_error(root: str) -> None:
    """Restores while process 1 can't list its local steps."""
    name_format = type(ocp.path.step.standard_name_format())
    broken = mock.patch.object(name_format, "find_all", side_effect=OSError("the RAM disk is gone"))
    with manager(root) as running, broken if jax.process_index() == 1 else contextlib.nullcontext():
        running.restore(1)


_REMOVED = {"local": "persistent", "persistent": "host*", "damaged persistent": "host*"}  # by tier
_DAMAGED = {"damaged local": "host1/**/d/*", "damaged persistent": "persistent/**/d/*"}


def with_tier(root: str, tier: str) -> str:
    """Returns a copy of the steps in which only one tier has the step, or the files that are read are damaged."""
    copy = pathlib.Path(f"{root}.{tier.replace(' ', '_')}")
    if not copy.exists():
        shutil.copytree(root, copy)
        for directory in copy.glob(_REMOVED.get(tier, "none")):
            shutil.rmtree(directory)
        for file in copy.glob(_DAMAGED.get(tier, "none")):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return str(copy)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 4), ("dp", "tp"))


@contextlib.contextmanager
def manager(root: str) -> Iterator[Any]:
    _initialize()
    emergency = importlib.import_module("orbax.checkpoint.experimental.emergency.checkpoint_manager")
    directories = f"{root}/host{jax.process_index()}", f"{root}/persistent"
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        replica_axis_index=0,
    )
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=scenarios.sharding(mesh()))
        for name, value in values().items()
    }
    running = emergency.CheckpointManager(*directories, mesh(), abstract, options=options)
    try:
        yield running
    finally:
        running.close()


@functools.cache
def _initialize() -> None:
    multihost = importlib.import_module("orbax.checkpoint._src.multihost.multihost")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
