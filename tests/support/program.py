"""A trainer that knows nothing of orbax_ext: it joins its job, saves or restores, and prints what came back.

    python program.py COORDINATOR PROCESSES RANK (save | plain | single_replica) CHECKPOINT

It ends with exit code 3, so that a test sees that the code is the program's.
"""

import json
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

EXPECTED = {
    "mask": np.arange(64).reshape(8, 8) % 3 == 0,
    "quantized": np.arange(-32, 32, dtype=np.int8).reshape(8, 8),
    "zeros": np.full((8, 8), -0.0, np.float32),
    "weights": np.arange(0xFF80, 0xFFC0, dtype=np.uint16).view(jax.numpy.bfloat16).reshape(8, 8),  # many are NaN
}


def main() -> None:
    coordinator, processes, rank, mode, path = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(processes), int(rank))
    mesh = Mesh(np.array(jax.devices()).reshape(int(processes), -1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    with ocp.CheckpointManager(path, item_names=("items",)) as manager:
        if mode == "save":
            save(manager, sharding)
        else:
            print(json.dumps(changed(restore(manager, sharding, mode))))
    sys.exit(3)


def save(manager: ocp.CheckpointManager, sharding: NamedSharding) -> None:
    state = {
        name: jax.make_array_from_callback(data.shape, sharding, data.__getitem__) for name, data in EXPECTED.items()
    }
    manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))


def restore(manager: ocp.CheckpointManager, sharding: NamedSharding, mode: str) -> dict[str, jax.Array]:
    abstract = {
        name: jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding) for name, data in EXPECTED.items()
    }
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    if mode == "single_replica":  # as MaxText does
        handler = type_handlers.SingleReplicaArrayHandler(
            replica_axis_index=0, broadcast_memory_limit_bytes=1024 * 1024 * 1000
        )
        type_handlers.register_type_handler(jax.Array, handler, override=True)
        restore_args = {
            name: type_handlers.SingleReplicaArrayRestoreArgs(
                sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )
            for name, leaf in abstract.items()
        }
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args)
    return dict(manager.restore(0, args=ocp.args.Composite(items=args))["items"])


def changed(state: dict[str, jax.Array]) -> dict[str, str]:
    """Returns the leaves of which this process has other bytes than were saved."""
    return {
        name: str(array.dtype)
        for name, array in state.items()
        for shard in array.addressable_shards
        if np.asarray(shard.data).tobytes() != EXPECTED[name][shard.index].tobytes()
    }


if __name__ == "__main__":
    main()
