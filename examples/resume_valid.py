"""Resumes from the newest step that every process can restore and whose bytes are those that were saved.

    srun python resume_valid.py CHECKPOINTS [--steps 100]

After each save it writes the digests of the step; the next start compares them and skips damaged steps.
"""

import argparse
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", help="a folder that all processes see")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    jax.distributed.initialize()
    orbax_ext.register(replica_axis="data", verify=True)  # each restore compares digests

    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(args.checkpoints, options=options) as manager:
        state, done = first_or_latest_valid(manager, sharding)
        for step in range(done + 1, args.steps + 1):
            state = train_step(state)
            if step % 10 == 0:
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                if jax.process_index() == 0:
                    write_digests(args.checkpoints)
        if jax.process_index() == 0:
            print(f"step {args.steps} sum {float(state['weights'].addressable_shards[0].data.sum()):.9g}")


def first_or_latest_valid(manager, sharding):
    """Returns the state to go on with, and the number of steps that it has behind it."""
    abstract = {"weights": jax.ShapeDtypeStruct((256, 64), jnp.float32, sharding=sharding)}
    if manager.latest_step() is None:
        return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding), abstract), 0
    valid = orbax_ext.restore_latest_valid(manager, ocp.args.StandardRestore(abstract))
    for step in valid.skipped:
        manager.delete(step)  # makes way for the same step of this run
    if jax.process_index() == 0:
        print(f"resumed from step {valid.step}, skipped {sorted(valid.skipped)}", flush=True)
    return valid.state, valid.step


def write_digests(checkpoints):
    """Stores what the bytes of the newest step are. A program of its own reads them back from storage."""
    subprocess.run([sys.executable, "-m", "orbax_ext", "verify", "--write", checkpoints], check=True)


@jax.jit
def train_step(state):
    return jax.tree.map(lambda leaf: leaf * 1.01 + 0.5, state)


if __name__ == "__main__":
    main()
