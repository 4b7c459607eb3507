"""How known trainers call a single-replica restore, with the handler's class as the one word to replace.

Run on the processes of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import type_handlers

import orbax_ext
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from tests.support import plain, world
from tests.support.world import MeshSpec

DATA_FIRST = MeshSpec((4, 8), ("dp", "tp"))  # MaxText has its data axis first


def maxtext(path: str, handler_class: Any) -> Any:
    """Registers when the manager is there already, and gives the deprecated single-replica shardings."""
    mesh = DATA_FIRST.make()
    abstract = world.abstract_state(world.STATE, mesh)
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
    """Brings a metadata store of its own, and says everything about a leaf, twice where it can."""
    mesh = world.REPORTERS.make()
    abstract = world.abstract_state(world.STATE, mesh)
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
    """Orbax's own peer-to-peer manager: a private registry with the array handler alone, given per item."""
    abstract = world.abstract_state(world.STATE, world.REPORTERS.make())
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


SHAPES: dict[str, Callable[[str, Any], Any]] = {"maxtext": maxtext, "axlearn": axlearn, "orbax_p2p": orbax_p2p}


def save(path: str) -> None:
    state = world.make_state(world.STATE, world.REPORTERS.make())
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))


def compare(path: str, name: str, whose: str = "ours") -> plain.Comparison:
    """Restores as a trainer does, with `ArrayHandler` in the place of the handler, and with ours or the stock one."""
    before = type_handlers.get_type_handler(jax.Array)
    handler_class: Any = orbax_ext.BroadcastArrayHandler if whose == "ours" else type_handlers.SingleReplicaArrayHandler
    shape = SHAPES[name]
    try:
        return plain.compare(lambda: shape(path, _plain_handler), {}, lambda: shape(path, handler_class))
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)


def _plain_handler(replica_axis_index: int, broadcast_memory_limit_bytes: int, **settings: Any) -> Any:
    return type_handlers.ArrayHandler(**settings)
