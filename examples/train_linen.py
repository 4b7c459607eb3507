"""Trains a flax Linen model with a `TrainState`, saves as it goes, and resumes where it stopped.

srun python train_linen.py CHECKPOINTS [--steps 100]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext

BATCH, WIDTH, HIDDEN = 32, 16, 64


class Net(nn.Module):
    """A network of two layers, the first one sharded over the devices of a process."""

    @nn.compact
    def __call__(self, x):
        sharded = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.relu(nn.Dense(HIDDEN, kernel_init=sharded)(x))
        return nn.Dense(1)(x)[:, 0]


def create():
    params = Net().init(jax.random.key(0), jnp.zeros((1, WIDTH)))
    return TrainState.create(apply_fn=Net().apply, params=params, tx=optax.adamw(1e-2))


def train_step(state, x, y):
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean((state.apply_fn(params, x) - y) ** 2))(state.params)
    return state.apply_gradients(grads=gradients), loss


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
        state = nn.unbox(jax.jit(create, out_shardings=nn.get_sharding(jax.eval_shape(create), mesh))())
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(abstract))
        jitted_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
        for step in range(done + 1, args.steps + 1):
            state, loss = jitted_step(state, *batch_of(step, mesh))
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.9g}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    main()
