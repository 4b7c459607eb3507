"""Leaves that are too large for one exchange are restored in slices, along their stored chunks."""

from __future__ import annotations

import math
from unittest import mock

import orbax.checkpoint as ocp
import pytest

from orbax_ext import lab
from orbax_ext.storage import counters
from orbax_ext.transfer import own_reads
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {
    "rows": Spec((512, 256), "float32", P("tp")),  # sliced along its sharded dimension
    "columns": Spec((64, 2048), "bfloat16", P("tp")),  # sliced along its other dimension
    "whole": Spec((512, 128), "int8"),  # every device has a replica
    "complex": Spec((256, 64), "complex64", P(None, "tp")),
    "layer": Spec((2048, 1024), "bfloat16", P("tp")),
    "small": Spec((16,), "float32"),
}
CHUNKS = {"layer": 32 << 10}  # bytes; 2048 for the others
LIMIT = 128 << 10  # so that slices are small enough to be packed
LARGER = 2 << 20  # so that all replicas read a piece of every slice of the layer


@pytest.fixture(scope="module")
def chunked(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("chunked") / "checkpoint")
    small_cluster.run(save_in_small_chunks, path)
    return path


@pytest.mark.parametrize(("limit", "least"), [(LIMIT, 16), (LARGER, 4)])
@pytest.mark.parametrize("strategy", states.STRATEGIES)
def test_a_leaf_in_slices_is_restored_exactly(
    small_cluster: lab.Cluster, chunked: str, strategy: str, limit: int, least: int
) -> None:
    knobs = {"strategy": strategy, "broadcast_memory_limit_bytes": limit}
    for groups in small_cluster.run(restore_and_count_groups, chunked, {**knobs, **_axis(strategy)}):
        assert groups > least


@pytest.mark.parametrize("context", ["set_mesh", "other mesh"])
def test_slices_are_restored_under_any_mesh_scope(small_cluster: lab.Cluster, chunked: str, context: str) -> None:
    knobs = {"strategy": "spread", "broadcast_memory_limit_bytes": LIMIT}
    assert small_cluster.run(states.restore, chunked, STATE, MESH, context=context, knobs=knobs) == [[]] * 4


def test_no_stored_byte_is_read_twice(small_cluster: lab.Cluster, chunked: str) -> None:
    at_once = sum(small_cluster.run(restore_and_count_bytes, chunked, 1 << 30))
    in_slices = sum(small_cluster.run(restore_and_count_bytes, chunked, LIMIT))
    # Slices may only add the little metadata that is read each time an array is opened.
    assert in_slices < at_once * 1.25


def _axis(strategy: str) -> dict[str, str]:
    return {"replica_axis": "dp"} if strategy == "single" else {}


# Run on the processes.


def save_in_small_chunks(path: str) -> None:
    state = states.make_state(STATE, MESH.make())
    args = {name: ocp.SaveArgs(chunk_byte_size=CHUNKS.get(name, 2048)) for name in state}
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state, save_args=args))
        manager.wait_until_finished()


def restore_and_count_groups(path: str, knobs: dict[str, object]) -> int:
    return states.restore_exactly(path, knobs, STATE, MESH).groups


def restore_and_count_bytes(path: str, limit: int) -> int:
    """Restores with the readers of the plan: on a busy machine, others may read to measure or to take over."""
    knobs = {"strategy": "spread", "broadcast_memory_limit_bytes": limit, "late_seconds": math.inf}
    before = counters.bytes_read()
    with mock.patch.object(own_reads, "_LONG_ENOUGH", math.inf):
        states.restore_exactly(path, knobs, STATE, MESH)
    return counters.bytes_read() - before
