"""Saving works as before while our handler is registered; the stock handler breaks it."""

from __future__ import annotations

import pathlib

import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.lab import handlers
from tests.support import states

KINDS = [pytest.param("manager", marks=pytest.mark.core), "Checkpointer", "AsyncCheckpointer", "StandardCheckpointer"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_while_registered_writes_what_plain_orbax_writes(cluster: lab.Cluster, path: str, kind: str) -> None:
    cluster.run(save_with, f"{path}/plain", kind, "plain")
    cluster.run(save_with, f"{path}/ours", kind, "ours")
    assert _layout(f"{path}/ours") == _layout(f"{path}/plain")
    assert states.all_differences(cluster.run(read_back, f"{path}/ours", kind)) == []


@pytest.mark.core
def test_a_save_after_a_restore_works(cluster: lab.Cluster, path: str) -> None:
    assert states.all_differences(cluster.run(restore_then_save, path, "ours")) == []


def test_stock_orbax_cannot_save_after_a_restore(cluster: lab.Cluster, path: str) -> None:
    outcomes = cluster.submit(restore_then_save, path, "stock").outcomes(grace=2)
    assert any("No ArrayMetadata found" in str(outcome) for outcome in outcomes)


def test_a_restore_writes_nothing_to_the_checkpoint(cluster: lab.Cluster, saved: str) -> None:
    before = _content(saved)
    assert states.all_differences(cluster.run(states.restore, saved, states.STATE)) == []
    assert _content(saved) == before


def _layout(path: str) -> set[str]:
    """Returns the names of all files, but only the folders of OCDBT's data files, whose names are random."""
    files = [file.relative_to(path) for file in pathlib.Path(path).rglob("*") if file.is_file()]
    return {str(file.parent if file.parent.name == "d" else file) for file in files}


def _content(path: str) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in pathlib.Path(path).rglob("*") if file.is_file()}


# Run on the processes.


def save_with(path: str, kind: str, implementation: str) -> None:
    state = states.make_state(states.STATE, states.REPORTED_MESH.make())
    with handlers.registered(implementation, **({"replica_axis": "dp"} if implementation == "ours" else {})):
        if kind == "manager":
            with ocp.CheckpointManager(path) as manager:
                manager.save(0, args=ocp.args.PyTreeSave(state))
                manager.wait_until_finished()
        elif kind == "StandardCheckpointer":
            with ocp.StandardCheckpointer() as standard:
                standard.save(path, state)
        else:
            handler = ocp.PyTreeCheckpointHandler()
            checkpointer_class = ocp.Checkpointer if kind == "Checkpointer" else ocp.AsyncCheckpointer
            with checkpointer_class(handler) as checkpointer:
                checkpointer.save(path, args=ocp.args.PyTreeSave(state))


def read_back(path: str, kind: str) -> list[str]:
    """Restores with plain Orbax."""
    mesh = states.REPORTED_MESH.make()
    item_path = f"{path}/0/default" if kind == "manager" else path
    abstract = states.abstract_state(states.STATE, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        return states.differences(checkpointer.restore(item_path, abstract), states.STATE, mesh)


def restore_then_save(path: str, implementation: str) -> list[str]:
    """Registers the handler after the checkpointer is made, restores and saves, as trainers do."""
    mesh = states.REPORTED_MESH.make()
    abstract = states.abstract_state(states.STATE, mesh)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{path}/0", args=ocp.args.PyTreeSave(states.make_state(states.STATE, mesh)))
        with handlers.registered(implementation, **states.knobs_for(implementation, states.REPORTED_MESH, "dp")):
            args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
            state = checkpointer.restore(f"{path}/0", args=args)
            checkpointer.save(f"{path}/1", args=ocp.args.PyTreeSave(state))
    return read_back(f"{path}/1", "plain")
