"""Restores on real processes are exact in every mesh scope and geometry; stock Orbax fails under set_mesh."""

from __future__ import annotations

import gc
import math
import weakref

import jax
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.options import Strategy
from tests.support import fault_injection, states
from tests.support.states import MeshSpec, P, Spec

CONTEXTS = ["none", pytest.param("set_mesh", marks=pytest.mark.core), "with mesh", "other mesh"]


@pytest.mark.parametrize("strategy", states.STRATEGIES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_restore_is_exact_whatever_mesh_the_caller_has_set(
    cluster: lab.Cluster, saved: str, context: str, strategy: str
) -> None:
    knobs = {"replica_axis": "dp", "strategy": strategy}
    by_process = cluster.run(states.restore, saved, states.STATE, context=context, knobs=knobs)
    assert states.all_differences(by_process) == []


@pytest.mark.core
def test_a_direct_restore_is_exact(cluster: lab.Cluster, saved: str) -> None:
    by_process = cluster.run(states.restore, saved, states.STATE, context="set_mesh", knobs={"strategy": "direct"})
    assert states.all_differences(by_process) == []


@pytest.mark.core
def test_stock_orbax_fails_under_set_mesh_on_all_processes(
    cluster: lab.Cluster, saved: str, orbax: tuple[int, ...]
) -> None:
    knobs = states.knobs_for("stock", states.REPORTED_MESH, "dp")
    outcomes = cluster.outcomes(
        states.restore, saved, states.STATE, implementation="stock", context="set_mesh", knobs=knobs
    )
    failed = ["incompatible devices" in str(outcome) for outcome in outcomes]
    assert failed == [orbax < (0, 11, 40)] * 4  # fixed upstream in 0.11.40


@pytest.mark.core
@pytest.mark.parametrize("strategy", states.STRATEGIES)
def test_a_read_error_of_one_process_is_raised_by_all_and_names_it_if_readers_are_strict(
    cluster: lab.Cluster, saved: str, strategy: str
) -> None:
    knobs = {"replica_axis": "dp", "strategy": strategy, "strict_readers": True}
    for outcome in cluster.outcomes(restore_with_a_bad_disk, saved, 0, knobs):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 0 (" in str(outcome)
        assert "OSError: the disk is gone" in str(outcome)


@pytest.mark.parametrize("strategy", ["direct", "auto"])
def test_an_error_before_the_first_meeting_is_raised_by_all_and_names_its_process(
    cluster: lab.Cluster, saved: str, strategy: str
) -> None:
    knobs = {"strategy": strategy, "stall_timeout": 5.0}
    for outcome in cluster.outcomes(restore_with_bad_metadata, saved, 2, knobs):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 2 (" in str(outcome)
        assert "OSError: no metadata here" in str(outcome)


GEOMETRIES = {
    "replica axis first": (MeshSpec((4, 8), ("dp", "tp")), "dp"),
    "replica axis in the middle": (MeshSpec((2, 4, 4), ("pp", "dp", "tp")), "dp"),
    "replica axis last": (MeshSpec((8, 4), ("tp", "dp")), "dp"),
    "a replica spans several processes": (MeshSpec((2, 16), ("dp", "tp")), "dp"),
    "a process spans several replicas": (MeshSpec((16, 2), ("dp", "tp")), "dp"),
    "every device a replica": (MeshSpec((32,), ("dp",)), "dp"),
    "explicit axes": (MeshSpec((4, 8), ("dp", "tp"), ("explicit", "explicit")), "dp"),
    "mixed axes": (MeshSpec((4, 8), ("dp", "tp"), ("explicit", "auto")), "dp"),
}


_SLOW = {"replica axis in the middle", "replica axis last", "a process spans several replicas"}


@pytest.mark.parametrize(
    "geometry", [pytest.param(name, marks=[pytest.mark.once] if name in _SLOW else []) for name in GEOMETRIES]
)
def test_a_restore_is_exact_wherever_the_replicas_are(cluster: lab.Cluster, path: str, geometry: str) -> None:
    mesh, axis = GEOMETRIES[geometry]
    specs = _state_for(mesh)
    cluster.run(states.save, path, specs, mesh)
    for knobs in ({"strategy": "single", "replica_axis": axis}, {"strategy": "spread"}):
        by_process = cluster.run(states.restore, path, specs, mesh, context="set_mesh", knobs=knobs)
        assert states.all_differences(by_process) == [], knobs


def test_the_replica_axis_need_not_be_named(cluster: lab.Cluster, saved: str) -> None:
    assert states.all_differences(cluster.run(states.restore, saved, states.STATE, knobs={"strategy": "single"})) == []


@pytest.mark.parametrize("primary", [0, 3])
def test_any_replica_can_be_the_reader(cluster: lab.Cluster, saved: str, primary: int) -> None:
    knobs = {"replica_axis": "dp", "primary_replica_id": primary}
    # However busy this machine is, a process that is late reads its own share.
    read = cluster.run(restore_and_count_reads, saved, {**knobs, "late_seconds": math.inf})
    assert [count > 0 for count in read] == [process == primary for process in range(4)]


def test_a_small_memory_limit_makes_several_groups(cluster: lab.Cluster, saved: str) -> None:
    large, small = (_groups(cluster, saved, limit) for limit in (1 << 30, 600))
    assert large < small


def test_processes_with_different_limits_agree_on_the_smallest(cluster: lab.Cluster, saved: str) -> None:
    assert cluster.run(restore_with_different_limits, saved) == [_groups(cluster, saved, 600)] * 4


def _groups(cluster: lab.Cluster, saved: str, limit: int) -> int:
    """Returns the number of groups, which all processes agree on, with this limit."""
    knobs = {"replica_axis": "dp", "broadcast_memory_limit_bytes": limit}
    counts = cluster.run(restore_and_count_groups, saved, knobs)
    assert len(set(counts)) == 1, counts
    return int(counts[0])


def test_a_restore_is_exact_with_half_a_replica_on_each_process(half_cluster: lab.Cluster, path: str) -> None:
    mesh = MeshSpec((1, 2, 8), ("pp", "dp", "tp"))
    half_cluster.run(states.save, path, states.STATE, mesh)
    knobs = {"replica_axis": "dp"}
    by_process = half_cluster.run(states.restore, path, states.STATE, mesh, context="set_mesh", knobs=knobs)
    assert states.all_differences(by_process) == []


def test_memory_kinds_are_kept(cluster: lab.Cluster, path: str) -> None:
    specs = {
        "on_device": Spec((16, 8), "float32", P("tp")),
        "pinned": Spec((16, 8), "float32", P("tp"), "pinned_host"),
        "unpinned": Spec((16, 8), "bfloat16", P(), "unpinned_host"),
    }
    cluster.run(states.save, path, {name: Spec(spec.shape, spec.dtype, spec.spec) for name, spec in specs.items()})
    assert states.all_differences(cluster.run(states.restore, path, specs, context="set_mesh")) == []


def _state_for(mesh: MeshSpec) -> dict[str, Spec]:
    """Returns the usual state, sharded over tp only if the mesh has that axis, with sizes that all meshes divide."""
    specs = {**states.STATE, "quantized": Spec((16, 16), "int8", P("tp", None))}
    return specs if "tp" in mesh.names else {name: Spec(spec.shape, spec.dtype) for name, spec in specs.items()}


@pytest.mark.parametrize("strategy", ["single", "spread", "direct"])
def test_arrays_that_the_caller_drops_are_freed_at_once(cluster: lab.Cluster, saved: str, strategy: str) -> None:
    assert cluster.run(count_arrays_alive_after_drop, saved, strategy) == [0] * 4


# Run on the processes.


def restore_with_a_bad_disk(path: str, rank: int, knobs: dict[str, object]) -> None:
    with fault_injection.on(rank, fault_injection.read_error):
        states.restore(path, states.STATE, knobs=knobs)


def restore_with_bad_metadata(path: str, rank: int, knobs: dict[str, object]) -> None:
    with fault_injection.on(rank, fault_injection.error_while_describing):
        states.restore(path, states.STATE, knobs=knobs)


def restore_and_count_reads(path: str, knobs: dict[str, object]) -> int:
    reads = 0

    async def count() -> None:
        nonlocal reads
        reads += 1

    with fault_injection.before_each_read(count):
        assert states.restore(path, states.STATE, knobs=knobs) == []
    return reads


def restore_and_count_groups(path: str, knobs: dict[str, object]) -> int:
    return states.restore_exactly(path, knobs).groups


def restore_with_different_limits(path: str) -> int:
    limit = 600 if jax.process_index() == 2 else 1 << 30
    return restore_and_count_groups(path, {"replica_axis": "dp", "broadcast_memory_limit_bytes": limit})


def count_arrays_alive_after_drop(path: str, strategy: Strategy) -> int:
    """Returns the number of arrays that stay until Python collects garbage, which may be too late."""
    abstract = states.abstract_state(states.STATE, states.REPORTED_MESH.make())
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with orbax_ext.registered(strategy=strategy), ocp.CheckpointManager(path) as manager:
        gc.collect()
        gc.disable()
        try:
            restored = manager.restore(0, args=args)
            arrays = [weakref.ref(array) for array in jax.tree.leaves(restored)]
            del restored
            return sum(array() is not None for array in arrays)
        finally:
            gc.enable()
