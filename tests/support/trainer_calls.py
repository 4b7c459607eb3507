"""Single-replica restores as known trainers call them, with a given handler class. Run on the processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import type_handlers

import orbax_ext
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from tests.support import plain_orbax, states
from tests.support.states import MeshSpec

DATA_FIRST = MeshSpec((4, 8), ("dp", "tp"))  # MaxText has its data axis first


def maxtext(path: str, handler_class: Any) -> Any:
    """Registers the handler after the manager is made, and passes the deprecated single-replica shardings."""
    mesh = DATA_FIRST.make()
    abstract = states.abstract_state(states.STATE, mesh)
    one_replica = Mesh(mesh.devices[:1], mesh.axis_names)

    def to_args(leaf: Any) -> Any:
        return type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=NamedSharding(mesh, leaf.sharding.spec),
            single_replica_sharding=NamedSharding(one_replica, leaf.sharding.spec),
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )

    with ocp.CheckpointManager(path, item_names=("items",)) as manager:
        handler = handler_class(replica_axis_index=0, broadcast_memory_limit_bytes=1024 * 1024 * 1000)
        type_handlers.register_type_handler(jax.Array, handler, override=True)
        args = ocp.args.PyTreeRestore(abstract, restore_args=jax.tree.map(to_args, abstract), partial_restore=True)
        return manager.restore(0, args=ocp.args.Composite(items=args))["items"]


def axlearn(path: str, handler_class: Any) -> Any:
    """Passes a metadata store of its own, and describes each leaf by mesh and axes and by sharding."""
    mesh = states.REPORTED_MESH.make()
    abstract = states.abstract_state(states.STATE, mesh)
    handler = handler_class(
        replica_axis_index=1, broadcast_memory_limit_bytes=1 << 30, array_metadata_store=ArrayMetadataStore()
    )
    type_handlers.register_type_handler(jax.Array, handler, override=True)

    def to_args(leaf: Any) -> Any:
        return type_handlers.SingleReplicaArrayRestoreArgs(
            dtype=leaf.dtype,
            mesh=mesh,
            mesh_axes=leaf.sharding.spec,
            sharding=leaf.sharding,
            shape=leaf.shape,
            strict=True,
        )

    composite = ocp.CompositeCheckpointHandler(items=ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(composite) as checkpointer:
        args = ocp.args.PyTreeRestore(abstract, restore_args=jax.tree.map(to_args, abstract))
        return checkpointer.restore(f"{path}/0", args=ocp.args.Composite(items=args))["items"]


def orbax_p2p(path: str, handler_class: Any) -> Any:
    """Orbax's own peer-to-peer manager: passes a private registry that has only the array handler."""
    abstract = states.abstract_state(states.STATE, states.REPORTED_MESH.make())
    processes = ocp.options.MultiprocessingOptions(primary_host=0, barrier_sync_key_prefix="persistent")
    handler = handler_class(
        replica_axis_index=1,
        broadcast_memory_limit_bytes=1024 * 1024 * 1000,
        primary_host=0,
        replica_id=0,
        use_replica_parallel=False,
    )
    items = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        multiprocessing_options=processes,
        type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, handler)),
    )
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=processes)
    with ocp.CheckpointManager(path, options=options, item_handlers={"items": items}) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
        return manager.restore(0, args=ocp.args.Composite(items=args))["items"]


TRAINERS: dict[str, Callable[[str, Any], Any]] = {"maxtext": maxtext, "axlearn": axlearn, "orbax_p2p": orbax_p2p}


def save(path: str) -> None:
    state = states.make_state(states.STATE, states.REPORTED_MESH.make())
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))


def compare(path: str, name: str, implementation: str = "ours") -> plain_orbax.Comparison:
    """Restores as a trainer does, with plain Orbax's handler and with ours or the stock one, and compares."""
    before = type_handlers.get_type_handler(jax.Array)
    handler_class = {
        "ours": orbax_ext.BroadcastArrayHandler,
        "stock": type_handlers.SingleReplicaArrayHandler,
    }[implementation]
    restore = TRAINERS[name]
    try:
        return plain_orbax.compare(lambda: restore(path, _plain_handler), {}, lambda: restore(path, handler_class))
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)


def _plain_handler(replica_axis_index: int, broadcast_memory_limit_bytes: int, **settings: Any) -> Any:
    return type_handlers.ArrayHandler(**settings)
