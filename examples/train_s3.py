"""Saves to a bucket and resumes from it.

    export AWS_ENDPOINT_URL=https://... AWS_REGION=... AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...
    srun python train_s3.py s3://bucket/run [--steps 100]

Needs `pip install '.[s3]'` from a checkout. Endpoint, region and credentials come from the usual places.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", help="s3://bucket/directory")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    jax.distributed.initialize()
    orbax_ext.register(replica_axis="data")  # before the manager, which looks at its directory at once

    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    abstract = {"weights": jax.ShapeDtypeStruct((256, 64), jnp.float32, sharding=sharding)}
    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=3)
    with ocp.CheckpointManager(args.checkpoints, options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(abstract))
        else:
            state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding), abstract)
        for step in range(done + 1, args.steps + 1):
            state = train_step(state)
            if jax.process_index() == 0:
                print(f"step {step} sum {float(state['weights'].addressable_shards[0].data.sum()):.9g}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))


@jax.jit
def train_step(state):
    return jax.tree.map(lambda leaf: leaf * 1.01 + 0.5, state)


if __name__ == "__main__":
    main()
