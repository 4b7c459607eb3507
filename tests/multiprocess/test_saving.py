"""Saving goes on as before while the handler is registered; the stock handler breaks it."""

from __future__ import annotations

import pathlib

import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.lab import handlers
from tests.support import world

KINDS = [pytest.param("manager", marks=pytest.mark.core), "Checkpointer", "AsyncCheckpointer", "StandardCheckpointer"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_while_registered_is_what_plain_orbax_saves(cluster: lab.Cluster, path: str, kind: str) -> None:
    cluster.run(save_with, f"{path}/plain", kind, "plain")
    cluster.run(save_with, f"{path}/ours", kind, "ours")
    assert _layout(f"{path}/ours") == _layout(f"{path}/plain")
    assert world.all_of(cluster.run(read_back, f"{path}/ours", kind)) == []


@pytest.mark.core
def test_a_save_after_a_restore_works(cluster: lab.Cluster, path: str) -> None:
    assert world.all_of(cluster.run(restore_then_save, path, "ours")) == []


def test_stock_orbax_cannot_save_after_a_restore(cluster: lab.Cluster, path: str) -> None:
    outcomes = cluster.submit(restore_then_save, path, "stock").outcomes(grace=2)
    assert any("No ArrayMetadata found" in str(outcome) for outcome in outcomes)


def test_a_restore_writes_nothing_to_the_checkpoint(cluster: lab.Cluster, saved: str) -> None:
    before = _content(saved)
    assert world.all_of(cluster.run(world.restore, saved, world.STATE)) == []
    assert _content(saved) == before


def _layout(path: str) -> set[str]:
    """The names of all files, without those of OCDBT's data files, which are random."""
    files = [file.relative_to(path) for file in pathlib.Path(path).rglob("*") if file.is_file()]
    return {str(file.parent if file.parent.name == "d" else file) for file in files}


def _content(path: str) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in pathlib.Path(path).rglob("*") if file.is_file()}


# Run on the processes.


def save_with(path: str, kind: str, how: str) -> None:
    state = world.make_state(world.STATE, world.REPORTERS.make())
    with handlers.registered(how, **({"replica_axis": "dp"} if how == "ours" else {})):
        if kind == "manager":
            with ocp.CheckpointManager(path) as manager:
                manager.save(0, args=ocp.args.PyTreeSave(state))
                manager.wait_until_finished()
        elif kind == "StandardCheckpointer":
            with ocp.StandardCheckpointer() as standard:
                standard.save(path, state)
        else:
            handler = ocp.PyTreeCheckpointHandler()
            made = ocp.Checkpointer(handler) if kind == "Checkpointer" else ocp.AsyncCheckpointer(handler)
            with made as checkpointer:
                checkpointer.save(path, args=ocp.args.PyTreeSave(state))


def read_back(path: str, kind: str) -> list[str]:
    """Restores with plain Orbax."""
    mesh = world.REPORTERS.make()
    where = f"{path}/0/default" if kind == "manager" else path
    abstract = world.abstract_state(world.STATE, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        return world.differences(checkpointer.restore(where, abstract), world.STATE, mesh)


def restore_then_save(path: str, how: str) -> list[str]:
    """As trainers do: Orbax's handlers are there first, then ours is registered, and they go on to save."""
    mesh = world.REPORTERS.make()
    abstract = world.abstract_state(world.STATE, mesh)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{path}/0", args=ocp.args.PyTreeSave(world.make_state(world.STATE, mesh)))
        with handlers.registered(how, **world.knobs_for(how, world.REPORTERS, "dp")):
            args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
            state = checkpointer.restore(f"{path}/0", args=args)
            checkpointer.save(f"{path}/1", args=ocp.args.PyTreeSave(state))
    return read_back(f"{path}/1", "plain")
