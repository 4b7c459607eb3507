"""Restores with Orbax's own single-replica handler, with the calls of known trainers in their order.

No line is written for orbax_ext: a test registers it first, or does not. Run on the processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import jax_array_handlers
from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
from orbax.checkpoint.experimental.emergency.p2p import persistent as p2p_persistent

import orbax_ext
from orbax_ext.report.report import publish
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from tests.support import states
from tests.support.states import MeshSpec

DATA_FIRST = MeshSpec((4, 8), ("dp", "tp"))  # MaxText, MaxDiffusion and p2p have their data axis first
ITEM = "items"


def _as_single_replica(leaf: Any) -> Any:
    """Describes a leaf as MaxText and MaxDiffusion do, with the deprecated sharding of this process's replica."""
    spec, mesh = leaf.sharding.spec, leaf.sharding.mesh
    mine = next(index for index, device in np.ndenumerate(mesh.devices) if device.process_index == jax.process_index())
    replica = Mesh(np.expand_dims(np.take(mesh.devices, mine[0], axis=0), axis=0), mesh.axis_names)
    return ocp.type_handlers.SingleReplicaArrayRestoreArgs(
        sharding=NamedSharding(mesh, spec),
        single_replica_sharding=NamedSharding(replica, spec),
        global_shape=leaf.shape,
        dtype=leaf.dtype,
    )


def maxtext(path: str, abstract: Any) -> Any:
    """Makes the manager, then registers the stock handler right before the restore."""
    options = ocp.CheckpointManagerOptions(create=True, save_interval_steps=1, enable_async_checkpointing=True)
    with ocp.CheckpointManager(path, item_names=(ITEM,), options=options) as manager:
        step = manager.latest_step()
        handler = ocp.type_handlers.SingleReplicaArrayHandler(
            replica_axis_index=0, broadcast_memory_limit_bytes=1024 * 1024 * 1000
        )
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        restore_args = jax.tree_util.tree_map(_as_single_replica, abstract)
        args = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True)
        return manager.restore(step, args=ocp.args.Composite(**{ITEM: args}))[ITEM]


def checkpointer_made_before(path: str, abstract: Any) -> Any:
    """Makes the checkpointer before it registers the stock handler, goes on to the next checkpoint, and restores it."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        handler = ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=0)
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        args = ocp.args.PyTreeRestore(item=abstract, restore_args=jax.tree.map(_as_single_replica, abstract))
        state = checkpointer.restore(f"{path}/0/{ITEM}", args=args)
        checkpointer.save(f"{path}_next", args=ocp.args.PyTreeSave(state), force=True)
        return checkpointer.restore(f"{path}_next", args=args)


def maxdiffusion(path: str, abstract: Any) -> Any:
    """As MaxText, but any exception means: start from scratch. The restore args are made after registering."""
    options = ocp.CheckpointManagerOptions(create=True, save_interval_steps=1, enable_async_checkpointing=True)
    with ocp.CheckpointManager(path, item_names=(ITEM,), options=options) as manager:
        step = manager.latest_step()
        try:
            handler = ocp.type_handlers.SingleReplicaArrayHandler(
                replica_axis_index=0, broadcast_memory_limit_bytes=1024 * 1024 * 1000
            )
            ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
            restore_args = jax.tree_util.tree_map(_as_single_replica, abstract)
            item = {ITEM: ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)}
            return manager.restore(step, args=ocp.args.Composite(**item))[ITEM]
        except:  # noqa: E722, as it is there
            return None


class _AxlearnCheckpointer:
    """Registers the handler in its constructor, with a metadata store of its own."""

    def __init__(self, path: str) -> None:
        handler = type_handlers.SingleReplicaArrayHandler(
            replica_axis_index=1, broadcast_memory_limit_bytes=1 << 30, array_metadata_store=ArrayMetadataStore()
        )
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(path, options=options, item_names=(ITEM,))

    def restore(self, abstract: Any) -> Any:
        args = ocp.args.PyTreeRestore(item=abstract, restore_args=jax.tree.map(self._restore_args, abstract))
        with self._manager:
            return self._manager.restore(self._manager.latest_step(), args=ocp.args.Composite(**{ITEM: args}))[ITEM]

    @staticmethod
    def _restore_args(leaf: Any) -> Any:
        return ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            dtype=leaf.dtype,
            mesh=leaf.sharding.mesh,
            mesh_axes=leaf.sharding.spec,
            sharding=leaf.sharding,
            shape=leaf.shape,
            strict=True,
        )


def axlearn(path: str, abstract: Any) -> Any:
    """Describes each leaf by mesh and axes and by sharding."""
    return _AxlearnCheckpointer(path).restore(abstract)


class _OwnHandler(type_handlers.SingleReplicaArrayHandler):
    """A subclass with a `deserialize` of its own, which calls Orbax's function."""

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        shardings = [arg.sharding for arg in args]
        return await jax_array_handlers._single_replica_deserialize_and_broadcast(
            infos,
            args,
            shardings,
            [self._construct_single_replica_sharding(sharding) for sharding in shardings],
            self.replica_axis_index,
            self.primary_replica_id,
            self._metadata_key,
            self.broadcast_memory_limit_bytes,
            self.broadcast_memory_scaling_factor,
        )


def subclass(path: str, abstract: Any) -> Any:
    """Registers a subclass of the stock handler."""
    ocp.type_handlers.register_type_handler(jax.Array, _OwnHandler(replica_axis_index=0), override=True)
    args = ocp.args.PyTreeRestore(item=abstract, restore_args=jax.tree.map(_as_single_replica, abstract))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(f"{path}/0/{ITEM}", args=args)


def _p2p_manager(path: str, mesh: Mesh) -> p2p_persistent.PersistentCheckpointManager:
    options = p2p_options()
    return p2p_persistent.PersistentCheckpointManager(path, mesh, replica_axis_index=0, options=options)


def p2p_options() -> Any:
    """Returns the options of Orbax's peer-to-peer manager, whose module is another one in older releases."""
    module = inspect.getmodule(p2p_persistent)
    home = getattr(module, "options_lib", None) or module.emergency_checkpoint_manager  # type: ignore[union-attr]
    persistent = home.PersistentCheckpointOptions(save_interval_steps=1)
    return home.CheckpointManagerOptions(persistent=persistent, replica_axis_index=0)


def orbax_p2p(path: str, abstract: Any) -> Any:
    """Orbax's own peer-to-peer manager itself, whose registry is private."""
    manager = _p2p_manager(f"{path}_p2p", DATA_FIRST.make())
    try:
        return manager.restore(manager.latest_step(), p2p_args.Composite(state=abstract)).state
    finally:
        manager.close()


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer's restore, and the mesh that it restores on."""

    restore: Callable[[str, Any], Any]
    mesh: MeshSpec = DATA_FIRST
    served_by: str = "SingleReplicaArrayHandler.deserialize"


TRAINERS = {
    "maxtext": Trainer(maxtext),
    "checkpointer_made_before": Trainer(checkpointer_made_before),
    "maxdiffusion": Trainer(maxdiffusion),
    "axlearn": Trainer(axlearn, states.REPORTED_MESH),
    "subclass": Trainer(subclass, served_by="jax_array_handlers._single_replica_deserialize_and_broadcast"),
}
# Before it had a handler that broadcasts, p2p let each replica read for itself.
if "SingleReplicaArrayHandler" in inspect.getsource(p2p_persistent):
    TRAINERS["orbax_p2p"] = Trainer(orbax_p2p)


def save(path: str) -> None:
    state = states.make_state(states.STATE, DATA_FIRST.make())
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(state)}))
    if "orbax_p2p" in TRAINERS:
        p2p = _p2p_manager(f"{path}_p2p", DATA_FIRST.make())
        p2p.save(0, p2p_args.Composite(state=ocp.args.PyTreeSave(state)))
        p2p.wait_until_finished()
        p2p.close()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trainer got on one process, and which of orbax_ext's hooks served it."""

    differences: list[str]
    strategies: list[str]
    served_by: str
    handler: str  # that is registered when orbax_ext is not any more


def run(path: str, name: str, implementation: str, under_mesh: bool = False) -> Outcome:
    """Runs a trainer's restore after nothing ("stock"), or after `orbax_ext.register()` ("registered")."""
    trainer = TRAINERS[name]
    mesh = trainer.mesh.make()
    publish(None)
    with _handler_kept(), jax.set_mesh(mesh) if under_mesh else contextlib.nullcontext():
        with _IMPLEMENTATIONS[implementation]():
            restored = trainer.restore(path, states.abstract_state(states.STATE, mesh))
        after = type(type_handlers.get_type_handler(jax.Array)).__name__
    report = orbax_ext.last_report()
    return Outcome(
        ["nothing was restored"] if restored is None else states.differences(restored, states.STATE, mesh),
        states.strategy_names(report.strategy.values()) if report else [],
        report.served_by if report else "",
        after,
    )


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    orbax_ext.register(strategy="spread")
    try:
        yield
    finally:
        orbax_ext.unregister()


def _word_swapped() -> Any:
    return mock.patch.object(type_handlers, "SingleReplicaArrayHandler", orbax_ext.BroadcastArrayHandler)


_IMPLEMENTATIONS: dict[str, Callable[[], Any]] = {
    "stock": contextlib.nullcontext,
    "registered": _registered,
    "word swapped": _word_swapped,
}


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """Puts the registered handler back, which the trainers do not."""
    before = type_handlers.get_type_handler(jax.Array)
    try:
        yield
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)
