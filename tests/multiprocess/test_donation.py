"""A step that donates its state reuses the memory of restored arrays, whichever way they came (jax #18617)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.lab import handlers
from tests.support import pending, states
from tests.support.states import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {
    # Many small leaves of one size: by chance one of eight would be at an address that JAX does not copy from.
    **{f"small_{number:02}": Spec((64,), "float32") for number in range(32)},
    "step": Spec((), "int32"),
    "batched": Spec((1024, 512), "bfloat16", P("tp")),
    **{f"alone_{number}": Spec((3, 1001, 1024), "float32") for number in range(2)},
    "sliced": Spec((8192, 512), "float32", P("tp")),
}


@pytest.fixture(scope="module")
def saved(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("donation") / "checkpoint")
    small_cluster.run(states.save, path, STATE, MESH)
    return path


def test_a_donating_step_reuses_the_memory_of_every_leaf(small_cluster: lab.Cluster, saved: str) -> None:
    strategies = ["spread", "single", "direct", "auto"]
    for moved in small_cluster.run(leaves_whose_memory_is_not_reused, saved, strategies):
        assert moved == {strategy: [] for strategy in strategies}


@pytest.mark.parametrize("exchange", ["result", "background"])
def test_so_does_a_step_after_a_pending_restore(small_cluster: lab.Cluster, saved: str, exchange: str) -> None:
    strategies = ["direct", "auto"]
    for moved in small_cluster.run(leaves_whose_memory_is_not_reused, saved, strategies, exchange):
        assert moved == {strategy: [] for strategy in strategies}


# Run on the processes.


def leaves_whose_memory_is_not_reused(
    path: str, strategies: list[str], exchange: str | None = None
) -> dict[str, list[str]]:
    return {strategy: _leaves_that_move(path, strategy, exchange) for strategy in strategies}


def _leaves_that_move(path: str, strategy: str, exchange: str | None) -> list[str]:
    abstract = states.abstract_state(STATE, MESH.make())
    knobs = {"strategy": strategy, "replica_axis": "dp", "broadcast_memory_limit_bytes": 16 << 20}
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with handlers.registered("ours", **knobs), ocp.CheckpointManager(path) as manager:
        if exchange is None:
            restored = manager.restore(0, args=args)
        else:
            pending_restore: Any = orbax_ext.restore_async(manager, 0, args=args, exchange=exchange)  # type: ignore[arg-type]
            pending.wait(pending_restore)
            restored = pending_restore.result()
    assert states.differences(restored, STATE, MESH.make()) == []
    before = {name: _addresses(array) for name, array in restored.items()}
    step = jax.jit(lambda state: jax.tree.map(lambda array: array + jnp.ones((), array.dtype), state), donate_argnums=0)
    after = jax.block_until_ready(step(restored))
    return [name for name in STATE if _addresses(after[name]) != before[name]]


def _addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
