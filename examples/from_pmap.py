"""Goes on with jit from a checkpoint of pmap's stacked state, one row of each leaf per device.

    srun python from_pmap.py save OLD            # what the program with pmap has left behind
    srun python from_pmap.py train OLD NEW

Only one row is read. No byte of the others, and the checkpoint in OLD does not change.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext

WEIGHTS = np.linspace(-1, 1, 256 * 64, dtype=np.float32).reshape(256, 64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["save", "train"])
    parser.add_argument("old", help="a folder that all processes see")
    parser.add_argument("new", nargs="?", help="another one")
    args = parser.parse_args()
    jax.distributed.initialize()
    orbax_ext.register()
    if args.what == "save":
        with ocp.CheckpointManager(args.old) as manager:
            manager.save(100, args=ocp.args.PyTreeSave(orbax_ext.stack({"weights": WEIGHTS}, jax.devices())))
        return

    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    abstract = {"weights": jax.ShapeDtypeStruct(WEIGHTS.shape, jnp.float32, sharding=sharding)}  # no axis of devices
    restore_args = orbax_ext.restore_args(abstract, stacked=True)
    with ocp.CheckpointManager(args.old) as manager:
        state = manager.restore(100, args=ocp.args.PyTreeRestore(abstract, restore_args=restore_args))
    with ocp.CheckpointManager(args.new) as manager:
        manager.save(101, args=ocp.args.StandardSave(train_step(state)))
    if jax.process_index() == 0:
        print(f"went on from step 100 with weights of shape {state['weights'].shape}")


@jax.jit
def train_step(state):
    return jax.tree.map(lambda leaf: leaf * 2, state)


if __name__ == "__main__":
    main()
