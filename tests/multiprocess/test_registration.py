"""The ways into a restore, with every kind of restore args, and what happens to bad input."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import orbax_ext
from orbax_ext import lab
from orbax_ext.report.report import publish
from orbax_ext.upstream import runtime
from tests.support import world
from tests.support.world import MeshSpec, P, Spec

ARGS = ["ArrayRestoreArgs", "SingleReplicaArrayRestoreArgs", "bare sharding", "mesh and axes", "abstract tree alone"]
CORE = {"SingleReplicaArrayRestoreArgs", "abstract tree alone"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.core if kind in CORE else ()) for kind in ARGS])
def test_pytree_restore_works_with(cluster: lab.Cluster, saved: str, kind: str) -> None:
    assert world.all_of(cluster.run(restore_with_args, saved, kind)) == []


@pytest.mark.core
def test_standard_restore_works(cluster: lab.Cluster, saved: str) -> None:
    assert world.all_of(cluster.run(restore_standard, saved)) == []


@pytest.mark.core
def test_the_handler_can_be_passed_instead_of_registered(cluster: lab.Cluster, saved: str) -> None:
    assert world.all_of(cluster.run(restore_with_own_handler, saved)) == []


def test_registering_after_the_manager_exists_is_soon_enough(cluster: lab.Cluster, saved: str) -> None:
    assert world.all_of(cluster.run(register_late, saved)) == []


def test_an_unknown_replica_axis_is_refused_with_the_axes_there_are(cluster: lab.Cluster, saved: str) -> None:
    outcomes = cluster.outcomes(world.restore, saved, world.STATE, knobs={"replica_axis": "data"})
    for outcome in outcomes:
        assert "ValueError: replica axis 'data' is not an axis of the mesh (pp=1, dp=4, tp=8)" in str(outcome)
        assert "'pp', 'dp', 'tp'" in str(outcome)


def test_a_primary_replica_that_does_not_exist_is_refused(cluster: lab.Cluster, saved: str) -> None:
    knobs = {"replica_axis": "dp", "primary_replica_id": 4}
    outcomes = cluster.outcomes(world.restore, saved, world.STATE, knobs=knobs)
    assert all("ValueError: primary_replica_id=4 does not exist" in str(outcome) for outcome in outcomes)


def test_what_cannot_be_broadcast_is_read_the_ordinary_way_with_one_line_in_the_log(
    cluster: lab.Cluster, path: str
) -> None:
    for lines, found in cluster.run(restore_what_cannot_be_broadcast, path):
        assert found == []
        assert len(lines) == 1
        assert "2 of 4 leaves are read directly" in lines[0]
        assert "sharded because it is sharded on the replica axis 'dp'" in lines[0]
        assert "alone because its sharding is a SingleDeviceSharding, not a NamedSharding" in lines[0]


def test_a_replica_axis_of_size_1_is_read_the_ordinary_way(cluster: lab.Cluster, saved: str) -> None:
    assert world.all_of(cluster.run(world.restore, saved, world.STATE, knobs={"replica_axis": "pp"})) == []


def test_the_barrier_before_a_broadcast_is_on_the_coordination_service_and_has_a_new_name_each_time(
    cluster: lab.Cluster, saved: str
) -> None:
    first, second = (cluster.run(watch_barriers, saved) for _ in range(2))
    assert first[1:] == first[:-1]  # the same on all processes
    assert len(first[0]) == 1  # the exchanges after the first follow a meeting
    assert not {name for name, *_ in first[0]} & {name for name, *_ in second[0]}
    for name, timeout, processes in first[0]:
        assert "single_replica_pre_broadcast" in name
        assert timeout == 123
        assert processes == {0, 1, 2, 3}


# Run on the processes.


def restore_with_args(path: str, kind: str) -> list[str]:
    mesh = world.REPORTERS.make()
    abstract = world.abstract_state(world.STATE, mesh)
    make: dict[str, Any] = {
        "ArrayRestoreArgs": lambda leaf: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        ),
        "SingleReplicaArrayRestoreArgs": lambda leaf: ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        ),
        "bare sharding": lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding),
        "mesh and axes": lambda leaf: ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=leaf.sharding.spec),
    }
    restore_args = jax.tree.map(make[kind], abstract) if kind in make else None
    return _restore(path, ocp.args.PyTreeRestore(abstract, restore_args=restore_args))


def restore_standard(path: str) -> list[str]:
    return _restore(path, ocp.args.StandardRestore(world.abstract_state(world.STATE, world.REPORTERS.make())))


def restore_with_own_handler(path: str) -> list[str]:
    mesh = world.REPORTERS.make()
    abstract = world.abstract_state(world.STATE, mesh)
    handler = orbax_ext.pytree_handler(replica_axis="dp", strategy="single")
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
    _must_have_been_broadcast()
    return world.differences(restored, world.STATE, mesh)


def register_late(path: str) -> list[str]:
    mesh = world.REPORTERS.make()
    abstract = world.abstract_state(world.STATE, mesh)
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with ocp.CheckpointManager(path) as manager:
        orbax_ext.register(replica_axis="dp")
        try:
            restored = manager.restore(0, args=args)
        finally:
            orbax_ext.unregister()
    _must_have_been_broadcast()
    return world.differences(restored, world.STATE, mesh)


def _restore(path: str, args: Any) -> list[str]:
    with orbax_ext.registered(replica_axis="dp"), ocp.CheckpointManager(path) as manager:
        restored = manager.restore(0, args=args)
    _must_have_been_broadcast()
    return world.differences(restored, world.STATE, world.REPORTERS.make())


def _must_have_been_broadcast() -> None:
    report = orbax_ext.last_report()
    assert report is not None
    assert world.ways(report.strategy) <= {"single", "spread"}, report.strategy
    publish(None)


def restore_what_cannot_be_broadcast(path: str) -> tuple[list[str], list[str]]:
    mesh = MeshSpec((4, 8), ("dp", "tp"))
    made = mesh.make()
    specs = {name: Spec((32, 8), "float32", spec) for name, spec in [("plain", P("tp")), ("sharded", P("dp"))]}
    specs |= {name: Spec((8,), "int8") for name in ("alone", "whole")}
    world.save(path, specs, mesh)
    here = SingleDeviceSharding(jax.local_devices()[0])
    abstract = world.abstract_state(specs, made)
    abstract["alone"] = jax.ShapeDtypeStruct((8,), "int8", sharding=here)
    ours = orbax_ext.registered(replica_axis="dp", strategy="single")
    with world.logged() as lines, ours, ocp.CheckpointManager(path) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
    found = [] if restored["alone"].sharding == here else ["alone: sharding"]
    if world.bits(restored["alone"]) != world.host_data(specs)["alone"].tobytes():
        found.append("alone: bytes")
    restored["alone"] = jax.make_array_from_callback(
        (8,), NamedSharding(made, P()), lambda index: world.host_data(specs)["alone"][index]
    )
    found += world.differences(restored, specs, made)
    return [line for line in lines if "leaves are read directly" in line], found


def watch_barriers(path: str) -> list[tuple[str, int, set[int]]]:
    seen = []
    original = runtime.sync_global_processes

    def watching(name: str, *, timeout: int, processes: set[int]) -> None:
        seen.append((name, timeout, processes))
        original(name, timeout=timeout, processes=processes)

    with mock.patch.object(runtime, "sync_global_processes", watching):
        knobs = {"replica_axis": "dp", "broadcast_memory_limit_bytes": 600, "stall_timeout": 123}
        assert world.restore(path, world.STATE, knobs=knobs) == []
    return seen
