"""Registered and passed handlers work with every kind of restore args, and refuse bad knobs."""

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
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

ARGS = ["ArrayRestoreArgs", "SingleReplicaArrayRestoreArgs", "bare sharding", "mesh and axes", "abstract tree alone"]
CORE = {"SingleReplicaArrayRestoreArgs", "abstract tree alone"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.core if kind in CORE else ()) for kind in ARGS])
def test_pytree_restore_works_with(cluster: lab.Cluster, saved: str, kind: str) -> None:
    assert states.all_differences(cluster.run(restore_with_args, saved, kind)) == []


@pytest.mark.core
def test_standard_restore_works(cluster: lab.Cluster, saved: str) -> None:
    assert states.all_differences(cluster.run(restore_standard, saved)) == []


@pytest.mark.core
def test_the_handler_can_be_passed_instead_of_registered(cluster: lab.Cluster, saved: str) -> None:
    assert states.all_differences(cluster.run(restore_with_own_handler, saved)) == []


def test_registering_after_the_manager_is_made_works(cluster: lab.Cluster, saved: str) -> None:
    assert states.all_differences(cluster.run(register_late, saved)) == []


def test_an_unknown_replica_axis_is_refused_with_the_known_axes(cluster: lab.Cluster, saved: str) -> None:
    outcomes = cluster.outcomes(states.restore, saved, states.STATE, knobs={"replica_axis": "data"})
    for outcome in outcomes:
        assert "ValueError: replica axis 'data' is not an axis of the mesh (pp=1, dp=4, tp=8)" in str(outcome)
        assert "'pp', 'dp', 'tp'" in str(outcome)


def test_a_primary_replica_that_does_not_exist_is_refused(cluster: lab.Cluster, saved: str) -> None:
    knobs = {"replica_axis": "dp", "primary_replica_id": 4}
    outcomes = cluster.outcomes(states.restore, saved, states.STATE, knobs=knobs)
    assert all("ValueError: primary_replica_id=4 does not exist" in str(outcome) for outcome in outcomes)


def test_leaves_that_cannot_be_broadcast_are_read_directly_with_one_line_in_the_log(
    cluster: lab.Cluster, path: str
) -> None:
    for lines, differences in cluster.run(restore_leaves_that_cannot_be_broadcast, path):
        assert differences == []
        assert len(lines) == 1
        assert "2 of 4 leaves are read directly" in lines[0]
        assert "sharded because it is sharded on the replica axis 'dp'" in lines[0]
        assert "alone because its sharding is a SingleDeviceSharding, not a NamedSharding" in lines[0]


def test_leaves_are_read_directly_with_a_replica_axis_of_size_1(cluster: lab.Cluster, saved: str) -> None:
    assert states.all_differences(cluster.run(states.restore, saved, states.STATE, knobs={"replica_axis": "pp"})) == []


def test_the_barrier_before_a_broadcast_has_a_new_name_each_time(cluster: lab.Cluster, saved: str) -> None:
    """It is on the coordination service, and all processes take part in it."""
    first, second = (cluster.run(watch_barriers, saved) for _ in range(2))
    assert first[1:] == first[:-1]  # the same on all processes
    assert len(first[0]) == 1  # the exchanges after the first one follow a meeting instead
    assert not {name for name, *_ in first[0]} & {name for name, *_ in second[0]}
    for name, timeout, processes in first[0]:
        assert "single_replica_pre_broadcast" in name
        assert timeout == 123
        assert processes == {0, 1, 2, 3}


# Run on the processes.


def restore_with_args(path: str, kind: str) -> list[str]:
    mesh = states.REPORTED_MESH.make()
    abstract = states.abstract_state(states.STATE, mesh)
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
    return _restore(path, ocp.args.StandardRestore(states.abstract_state(states.STATE, states.REPORTED_MESH.make())))


def restore_with_own_handler(path: str) -> list[str]:
    mesh = states.REPORTED_MESH.make()
    abstract = states.abstract_state(states.STATE, mesh)
    handler = orbax_ext.pytree_handler(replica_axis="dp", strategy="single")
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
    _assert_broadcast()
    return states.differences(restored, states.STATE, mesh)


def register_late(path: str) -> list[str]:
    mesh = states.REPORTED_MESH.make()
    abstract = states.abstract_state(states.STATE, mesh)
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with ocp.CheckpointManager(path) as manager:
        orbax_ext.register(replica_axis="dp", strategy="spread")
        try:
            restored = manager.restore(0, args=args)
        finally:
            orbax_ext.unregister()
    _assert_broadcast()
    return states.differences(restored, states.STATE, mesh)


def _restore(path: str, args: Any) -> list[str]:
    with orbax_ext.registered(replica_axis="dp", strategy="spread"), ocp.CheckpointManager(path) as manager:
        restored = manager.restore(0, args=args)
    _assert_broadcast()
    return states.differences(restored, states.STATE, states.REPORTED_MESH.make())


def _assert_broadcast() -> None:
    report = orbax_ext.last_report()
    assert report is not None
    assert set(states.strategy_names(report.strategy.values())) <= {"single", "spread"}, report.strategy
    publish(None)


def restore_leaves_that_cannot_be_broadcast(path: str) -> tuple[list[str], list[str]]:
    mesh = MeshSpec((4, 8), ("dp", "tp"))
    made = mesh.make()
    specs = {name: Spec((32, 8), "float32", spec) for name, spec in [("plain", P("tp")), ("sharded", P("dp"))]}
    specs |= {name: Spec((8,), "int8") for name in ("alone", "whole")}
    states.save(path, specs, mesh)
    one_device = SingleDeviceSharding(jax.local_devices()[0])
    abstract = states.abstract_state(specs, made)
    abstract["alone"] = jax.ShapeDtypeStruct((8,), "int8", sharding=one_device)
    ours = orbax_ext.registered(replica_axis="dp", strategy="single")
    with states.logged() as lines, ours, ocp.CheckpointManager(path) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
    differences = [] if restored["alone"].sharding == one_device else ["alone: sharding"]
    if states.bits(restored["alone"]) != states.host_data(specs)["alone"].tobytes():
        differences.append("alone: bytes")
    restored["alone"] = jax.make_array_from_callback(
        (8,), NamedSharding(made, P()), lambda index: states.host_data(specs)["alone"][index]
    )
    differences += states.differences(restored, specs, made)
    return [line for line in lines if "leaves are read directly" in line], differences


def watch_barriers(path: str) -> list[tuple[str, int, set[int]]]:
    barriers = []
    original = runtime.sync_global_processes

    def watching(name: str, *, timeout: int, processes: set[int]) -> None:
        barriers.append((name, timeout, processes))
        original(name, timeout=timeout, processes=processes)

    with mock.patch.object(runtime, "sync_global_processes", watching):
        knobs = {"replica_axis": "dp", "broadcast_memory_limit_bytes": 600, "stall_timeout": 123}
        assert states.restore(path, states.STATE, knobs=knobs) == []
    return barriers
