"""Saves often to a directory on each host and seldom to storage; resumes from whichever hosts still have the step.

srun python train_emergency.py /dev/shm/run CHECKPOINTS [--steps 100]
"""

import argparse
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import multihost
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

import orbax_ext


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("local", help="a directory on each host, such as a RAM disk")
    parser.add_argument("checkpoints", help="a folder that all processes see")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    jax.distributed.initialize()
    prepare_emergency_manager()
    orbax_ext.register(replica_axis="data")  # the only line about orbax_ext

    local = f"{args.local}/{jax.process_index()}"  # so that several processes on one host do not mix
    os.makedirs(local, exist_ok=True)
    os.makedirs(args.checkpoints, exist_ok=True)
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    abstract = {"weights": jax.ShapeDtypeStruct((256, 64), jnp.float32, sharding=sharding)}
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=10, max_to_keep=2),
        replica_axis_index=0,
    )
    manager = emergency.CheckpointManager(local, args.checkpoints, mesh, abstract, options=options)
    latest = manager.latest_step()
    if latest is not None:
        state = manager.restore(latest).state
    else:
        state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding), abstract)
    for step in range((latest or 0) + 1, args.steps + 1):
        state = train_step(state)
        if jax.process_index() == 0:
            print(f"step {step} sum {float(state['weights'].addressable_shards[0].data.sum()):.9g}", flush=True)
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    manager.wait_until_finished()
    manager.close()


def prepare_emergency_manager():
    """What Orbax's emergency manager expects of a program."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()


@jax.jit
def train_step(state):
    return jax.tree.map(lambda leaf: leaf * 1.01 + 0.5, state)


if __name__ == "__main__":
    main()
