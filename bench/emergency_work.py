"""The functions that the benchmark of the emergency manager runs on every process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import flags
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

import orbax_ext
from bench import memory, work
from bench.scenarios import Scenario
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from orbax_ext.upstream.runtime import coordination_client

STEP = 1


@dataclasses.dataclass(frozen=True)
class Restore:
    """One restore, as one process measured it."""

    started: float
    ended: float
    exact: bool
    peak: int  # resident bytes above the start
    fabric_received: int
    report: str = ""


def save(scenario: Scenario, local: str, persistent: str) -> None:
    """Saves a step: the first replica to persistent storage, the others each to the directory of their host."""
    state = {name: work.make_leaf(scenario, number) for number, name in enumerate(work.leaf_names(scenario))}
    with _manager(scenario, local, persistent) as manager:
        manager.save(STEP, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        manager.wait_until_finished()


def restore(scenario: Scenario, local: str, persistent: str, implementation: str, url: str) -> Restore:
    """Restores with "plain" Orbax from storage, with the "stock" emergency manager, or with that and "orbax_ext"."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(work.served_from(persistent, url))
        if implementation == "orbax_ext":
            stack.enter_context(orbax_ext.registered())
        if implementation == "plain":
            run: Any = lambda: _restore_plainly(scenario, persistent)  # noqa: E731
        else:
            manager = stack.enter_context(_manager(scenario, local, persistent))
            run = lambda: manager.restore(STEP).state  # noqa: E731
        # Not `sync_global_devices`: it runs a program, and the restore has to connect by itself.
        coordination_client().wait_at_barrier("bench", timeout_in_ms=work.START_LIMIT * 1000)
        received_before = work.received_bytes()
        moments: list[Any] = []

        def step() -> None:
            started = time.monotonic()
            state = jax.block_until_ready(run())
            moments.extend([started, time.monotonic(), state])

        peak = memory.peak_growth(step)
        started, ended, state = moments
        received = work.received_bytes() - received_before
    report = orbax_ext.last_report() if implementation == "orbax_ext" else None
    return Restore(started, ended, work.is_exact(scenario, state), peak, received, str(report or ""))


def _abstract(scenario: Scenario) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = work.make_sharding(scenario)
    leaf = jax.ShapeDtypeStruct(scenario.leaf, jnp.bfloat16, sharding=sharding)
    return dict.fromkeys(work.leaf_names(scenario), leaf)


def _restore_plainly(scenario: Scenario, persistent: str) -> Any:
    abstract = _abstract(scenario)
    handler = ocp.type_handlers.ArrayHandler(array_metadata_store=ArrayMetadataStore())
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        args = ocp.checkpoint_utils.construct_restore_args(abstract)
        return checkpointer.restore(
            f"{persistent}/{STEP}/default", args=ocp.args.PyTreeRestore(abstract, restore_args=args)
        )


@contextlib.contextmanager
def _manager(scenario: Scenario, local: str, persistent: str) -> Iterator[Any]:
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
    here = f"{local}/host{jax.process_index()}"
    os.makedirs(here, exist_ok=True)
    os.makedirs(persistent, exist_ok=True)
    mesh = work.make_mesh(scenario)
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=1),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1, max_to_keep=1),
        replica_axis_index=mesh.axis_names.index(scenario.replica_axis),
    )
    manager = emergency.CheckpointManager(here, persistent, mesh, _abstract(scenario), options=options)
    try:
        yield manager
    finally:
        manager.close()
