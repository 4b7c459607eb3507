"""The handler on real processes: every mesh scope and geometry, bit for bit; the stock handler beside it."""

from __future__ import annotations

import gc
import weakref

import jax
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from tests.support import injection, world
from tests.support.world import MeshSpec, P, Spec

CONTEXTS = ["none", pytest.param("set_mesh", marks=pytest.mark.core), "with mesh", "other mesh"]


@pytest.mark.parametrize("strategy", world.STRATEGIES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_restore_is_exact_whatever_mesh_the_caller_has_set(
    cluster: lab.Cluster, saved: str, context: str, strategy: str
) -> None:
    knobs = {"replica_axis": "dp", "strategy": strategy}
    found = cluster.run(world.restore, saved, world.STATE, context=context, knobs=knobs)
    assert world.all_of(found) == []


@pytest.mark.core
def test_a_restore_that_reads_the_ordinary_way_is_exact_too(cluster: lab.Cluster, saved: str) -> None:
    found = cluster.run(world.restore, saved, world.STATE, context="set_mesh", knobs={"strategy": "direct"})
    assert world.all_of(found) == []


@pytest.mark.core
def test_stock_orbax_fails_under_set_mesh_on_readers_and_on_the_others(
    cluster: lab.Cluster, saved: str, orbax: tuple[int, ...]
) -> None:
    knobs = world.knobs_for("stock", world.REPORTERS, "dp")
    outcomes = cluster.outcomes(world.restore, saved, world.STATE, how="stock", context="set_mesh", knobs=knobs)
    failed = ["incompatible devices" in str(outcome) for outcome in outcomes]
    assert failed == [orbax < (0, 11, 40)] * 4  # mended upstream in 0.11.40


@pytest.mark.core
@pytest.mark.parametrize("strategy", world.STRATEGIES)
def test_a_read_error_of_one_process_is_raised_by_all_and_names_it(
    cluster: lab.Cluster, saved: str, strategy: str
) -> None:
    for outcome in cluster.outcomes(restore_with_a_bad_disk, saved, 0, {"replica_axis": "dp", "strategy": strategy}):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 0 (" in str(outcome)
        assert "OSError: the disk is gone" in str(outcome)


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
def test_replicas_may_lie_anyhow_on_the_processes_and_their_axis_need_not_be_named(
    cluster: lab.Cluster, path: str, geometry: str
) -> None:
    mesh, axis = GEOMETRIES[geometry]
    specs = _state_for(mesh)
    cluster.run(world.save, path, specs, mesh)
    for knobs in ({"strategy": "single", "replica_axis": axis}, {"strategy": "spread"}):
        found = cluster.run(world.restore, path, specs, mesh, context="set_mesh", knobs=knobs)
        assert world.all_of(found) == [], knobs


def test_the_broadcast_finds_the_replica_axis_by_itself(cluster: lab.Cluster, saved: str) -> None:
    assert world.all_of(cluster.run(world.restore, saved, world.STATE, knobs={"strategy": "single"})) == []


@pytest.mark.parametrize("primary", [0, 3])
def test_any_replica_may_be_the_one_that_reads(cluster: lab.Cluster, saved: str, primary: int) -> None:
    knobs = {"replica_axis": "dp", "primary_replica_id": primary}
    read = cluster.run(restore_and_count_reads, saved, knobs)
    assert [count > 0 for count in read] == [process == primary for process in range(4)]


def test_a_small_memory_limit_makes_several_groups(cluster: lab.Cluster, saved: str) -> None:
    large, small = (_groups(cluster, saved, limit) for limit in (1 << 30, 600))
    assert large < small


def test_processes_with_different_limits_agree_on_the_smallest(cluster: lab.Cluster, saved: str) -> None:
    assert cluster.run(restore_with_limits_of_their_own, saved) == [_groups(cluster, saved, 600)] * 4


def _groups(cluster: lab.Cluster, saved: str, limit: int) -> int:
    """In how many groups all processes restore with this limit."""
    found = cluster.run(restore_and_count_groups, saved, {"replica_axis": "dp", "broadcast_memory_limit_bytes": limit})
    assert len(set(found)) == 1, found
    return int(found[0])


def test_half_a_replica_on_each_process(half_cluster: lab.Cluster, path: str) -> None:
    mesh = MeshSpec((1, 2, 8), ("pp", "dp", "tp"))
    half_cluster.run(world.save, path, world.STATE, mesh)
    found = half_cluster.run(world.restore, path, world.STATE, mesh, context="set_mesh", knobs={"replica_axis": "dp"})
    assert world.all_of(found) == []


def test_memory_kinds_are_kept(cluster: lab.Cluster, path: str) -> None:
    specs = {
        "on_device": Spec((16, 8), "float32", P("tp")),
        "pinned": Spec((16, 8), "float32", P("tp"), "pinned_host"),
        "unpinned": Spec((16, 8), "bfloat16", P(), "unpinned_host"),
    }
    cluster.run(world.save, path, {name: Spec(spec.shape, spec.dtype, spec.spec) for name, spec in specs.items()})
    assert world.all_of(cluster.run(world.restore, path, specs, context="set_mesh")) == []


def _state_for(mesh: MeshSpec) -> dict[str, Spec]:
    """The usual state, sharded over tp where the mesh has it."""
    return {
        name: spec if "tp" in mesh.names else Spec(spec.shape, spec.dtype) for name, spec in _divisible(mesh).items()
    }


def _divisible(mesh: MeshSpec) -> dict[str, Spec]:
    return {**world.STATE, "quantized": Spec((16, 16), "int8", P("tp", None))}


@pytest.mark.parametrize("strategy", ["single", "spread", "direct"])
def test_what_the_caller_lets_go_of_is_freed_at_once(cluster: lab.Cluster, saved: str, strategy: str) -> None:
    assert cluster.run(leaves_alive_after_they_were_let_go, saved, strategy) == [0] * 4


# Run on the processes.


def restore_with_a_bad_disk(path: str, rank: int, knobs: dict[str, object]) -> None:
    with injection.on(rank, injection.read_error):
        world.restore(path, world.STATE, knobs=knobs)


def restore_and_count_reads(path: str, knobs: dict[str, object]) -> int:
    from orbax.checkpoint._src.serialization import serialization

    reads = 0
    original = serialization.async_deserialize

    async def counting(*args: object, **kwargs: object) -> object:
        nonlocal reads
        reads += 1
        return await original(*args, **kwargs)

    serialization.async_deserialize = counting
    try:
        assert world.restore(path, world.STATE, knobs=knobs) == []
    finally:
        serialization.async_deserialize = original
    return reads


def restore_and_count_groups(path: str, knobs: dict[str, object]) -> int:
    import orbax_ext

    assert world.restore(path, world.STATE, knobs=knobs) == []
    report = orbax_ext.last_report()
    assert report is not None
    return report.groups


def restore_with_limits_of_their_own(path: str) -> int:
    import jax

    limit = 600 if jax.process_index() == 2 else 1 << 30
    return restore_and_count_groups(path, {"replica_axis": "dp", "broadcast_memory_limit_bytes": limit})


def leaves_alive_after_they_were_let_go(path: str, strategy: str) -> int:
    """How many arrays stay until Python collects garbage, which may be long after their memory is wanted."""
    abstract = world.abstract_state(world.STATE, world.REPORTERS.make())
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
