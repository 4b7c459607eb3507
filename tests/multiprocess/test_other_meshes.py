"""Leaves on meshes without the named replica axis are restored, beside others or alone."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding

import orbax_ext
from orbax_ext import lab
from orbax_ext.lab import handlers
from tests.support import plain_orbax, states
from tests.support.states import MeshSpec, P, Spec

TRAINING = MeshSpec((4, 2), ("dp", "tp"))
SAVED = {
    "weights": Spec((256, 256), "float32", P("tp")),
    "table": Spec((256, 256), "bfloat16"),
    "rows": Spec((64, 8), "int8"),
}
# The axes that each leaf is sharded over, by mesh.
TWO_MESHES = {"weights": ("training", P("tp")), "table": ("all", P()), "rows": ("all", P("all"))}
EVALUATION = {"weights": ("evaluation", P("x")), "table": ("evaluation", P()), "rows": ("one device", P())}
ONE_DEVICE = dict.fromkeys(SAVED, ("one device", P()))
NO_AXIS = dict.fromkeys(SAVED, ("all", P()))

KNOBS = {"replica_axis": "dp", "strategy": "single"}
LOG_LINE = (
    "orbax_ext: the replica axis {axis} is not an axis of {meshes}: leaves there travel along the axes that nothing is "
    "sharded over, or are read directly"
)


@pytest.fixture(scope="module")
def team(small_cluster: lab.Cluster) -> lab.Cluster:
    return small_cluster


@pytest.fixture(scope="module")
def checkpoint(team: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("meshes") / "checkpoint")
    team.run(states.save, path, SAVED, TRAINING)
    return path


def test_stock_orbax_takes_the_mesh_of_one_leaf_for_all(team: lab.Cluster, checkpoint: str) -> None:
    first, *others = team.outcomes(restore_stock, checkpoint, TWO_MESHES)
    assert first.failure is not None
    assert first.failure.type == "AttributeError"  # without a message
    assert "in get_primary_replica_ids_and_pids" in first.failure.traceback
    for outcome in others:
        assert f"process_index {outcome.rank} does not exist in provided `global_mesh`" in str(outcome)


@pytest.mark.parametrize("axis", ["dp", -2])
@pytest.mark.parametrize("strategy", ["auto", "single", "spread", "direct"])
def test_a_leaf_on_another_mesh_travels_along_the_axes_that_it_is_not_sharded_over(
    team: lab.Cluster, checkpoint: str, strategy: str, axis: str | int
) -> None:
    knobs = {"replica_axis": axis, "strategy": strategy}
    comparisons, lines = zip(*team.run(compare, checkpoint, TWO_MESHES, knobs), strict=True)
    plain_orbax.assert_restored(comparisons)
    assert list(lines) == [[LOG_LINE.format(axis=repr(axis), meshes="the mesh (all=8)")]] * 4
    if strategy in states.STRATEGIES:
        for comparison in comparisons:
            travels = {name for name, way in comparison.strategy.items() if way == strategy}
            # One replica reads for all only along axes that no leaf of the mesh is sharded over: "all" is none.
            assert travels == ({"weights"} if strategy == "single" else {"weights", "table"})


def test_a_whole_mesh_without_the_axis_travels_from_one_replica_too(team: lab.Cluster, checkpoint: str) -> None:
    tree = {name: ("training" if name == "weights" else "all", P()) for name in SAVED}
    for comparison, _ in team.run(compare, checkpoint, tree, KNOBS):
        plain_orbax.assert_restored([comparison])
        assert set(comparison.strategy.values()) == {"single"}
    # `primary_replica_id` counts along "dp": the other mesh may have fewer replicas.
    tree = {
        name: ("training" if name == "weights" else "two halves", P("x" if name == "rows" else None)) for name in SAVED
    }
    for comparison, _ in team.run(compare, checkpoint, tree, {**KNOBS, "primary_replica_id": 3}):
        plain_orbax.assert_restored([comparison])
        assert comparison.strategy["weights"] == "single"
        assert comparison.strategy["table"] == "direct: its mesh (h=2, x=4) has no replica 3"


@pytest.mark.parametrize("axis", ["dp", 1])
def test_an_axis_that_no_mesh_has_is_refused(team: lab.Cluster, checkpoint: str, axis: str | int) -> None:
    outcomes = team.outcomes(restore_ours, checkpoint, NO_AXIS, {**KNOBS, "replica_axis": axis})
    for outcome in outcomes:
        assert str(outcome).endswith(
            f"raised ValueError: replica axis {axis!r} is not an axis of the mesh (all=8). "
            "Give one of 'all', or an index below 1."
        )


@pytest.mark.parametrize("strategy", ["auto", "single"])
@pytest.mark.parametrize("axis", ["dp", 2])
@pytest.mark.parametrize("tree", [EVALUATION, ONE_DEVICE], ids=["evaluation", "one device"])
def test_a_process_restores_on_its_own_devices_while_an_axis_is_registered(
    team: lab.Cluster, checkpoint: str, tree: dict[str, Any], axis: str | int, strategy: str
) -> None:
    comparisons, lines = zip(
        *team.run(compare, checkpoint, tree, {"replica_axis": axis, "strategy": strategy}), strict=True
    )
    plain_orbax.assert_restored(comparisons)
    meshes = "the meshes (y=1), (x=2)" if tree is EVALUATION else "the mesh (y=1)"
    assert list(lines) == [[LOG_LINE.format(axis=repr(axis), meshes=meshes)]] * 4


# Run on the processes.


def make_mesh(name: str) -> Mesh:
    if name == "training":
        return TRAINING.make()
    devices, axis = {
        "all": (jax.devices(), "all"),
        "two halves": (np.array(jax.devices()).reshape(2, 4), ("h", "x")),
        "evaluation": (jax.local_devices(), "x"),
        "one device": (jax.local_devices()[:1], "y"),
    }[name]
    return Mesh(np.array(devices), axis)


def abstract_tree(tree: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(SAVED[name].shape, SAVED[name].dtype, sharding=NamedSharding(make_mesh(mesh), spec))
        for name, (mesh, spec) in tree.items()
    }


def restore(path: str, tree: dict[str, Any]) -> Any:
    abstract = abstract_tree(tree)
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(0, args=args)


def restore_stock(path: str, tree: dict[str, Any]) -> None:
    with handlers.registered("stock", replica_axis_index=0):
        restore(path, tree)


def restore_ours(path: str, tree: dict[str, Any], knobs: dict[str, Any]) -> None:
    with orbax_ext.registered(**knobs):
        restore(path, tree)


def compare(path: str, tree: dict[str, Any], knobs: dict[str, Any]) -> tuple[plain_orbax.Comparison, list[str]]:
    """Restores with plain Orbax and with orbax_ext, and returns also the log lines about meshes."""
    with states.logged() as lines:
        comparison = plain_orbax.compare(lambda: restore(path, tree), knobs)
    return comparison, [line for line in lines if "is not an axis" in line]
