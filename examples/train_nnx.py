"""Trains a flax NNX model, saves as it goes, and resumes where it stopped.

srun python train_nnx.py CHECKPOINTS [--steps 100]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext

BATCH, WIDTH, HIDDEN = 32, 16, 64


class Net(nnx.Module):
    """A network of two layers, the first one sharded over the devices of a process."""

    def __init__(self, rngs):
        sharded = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=sharded, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))[:, 0]


@nnx.jit
def create():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model, optimizer


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def batch_of(step, mesh):
    x = np.random.default_rng(step).standard_normal((BATCH, WIDTH), np.float32)
    return orbax_ext.shard((x, np.sin(x.sum(axis=1))), NamedSharding(mesh, PartitionSpec("data")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", help="a folder that all processes see")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    jax.distributed.initialize()
    orbax_ext.register(replica_axis="data")  # the only line about orbax_ext: every restore goes through it

    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=3)
    with jax.set_mesh(mesh), ocp.CheckpointManager(args.checkpoints, options=options) as manager:
        model_and_optimizer = create()
        done = manager.latest_step() or 0
        if done:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(model_and_optimizer))
            nnx.update(model_and_optimizer, manager.restore(done, args=ocp.args.StandardRestore(abstract)))
        for step in range(done + 1, args.steps + 1):
            loss = train_step(*model_and_optimizer, *batch_of(step, mesh))
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.9g}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(nnx.state(model_and_optimizer)))


if __name__ == "__main__":
    main()
