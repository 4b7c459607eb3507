"""A training loop like that of train_nnx.py, which compiles its step while the checkpoint is being read.

srun python overlap_nnx.py CHECKPOINTS [--steps 100]
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


def keep_shardings(*nodes):
    state = nnx.state(nodes)
    nnx.update(nodes, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))


@nnx.jit
def create():
    rngs, normal = nnx.Rngs(0), nnx.initializers.lecun_normal()
    up = nnx.Linear(WIDTH, HIDDEN, kernel_init=nnx.with_partitioning(normal, (None, "model")), rngs=rngs)
    model = nnx.Sequential(up, nnx.relu, nnx.Linear(HIDDEN, 1, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    keep_shardings(model, optimizer)
    return model, optimizer


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x)[:, 0] - y) ** 2))(model)
    optimizer.update(model, gradients)
    keep_shardings(model, optimizer)  # a compiled step takes only what it was compiled for
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
    orbax_ext.register(replica_axis="data")
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=3)
    with jax.set_mesh(mesh), ocp.CheckpointManager(args.checkpoints, options=options) as manager:
        model_and_optimizer = create()
        done, pending = manager.latest_step() or 0, None
        if done:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(model_and_optimizer))
            pending = orbax_ext.restore_async(manager, done, args=ocp.args.StandardRestore(abstract))

        compiled = train_step.lower(*model_and_optimizer, *batch_of(0, mesh)).compile()  # meanwhile

        if pending:
            nnx.update(model_and_optimizer, pending.result())
        for step in range(done + 1, args.steps + 1):
            loss = compiled(*model_and_optimizer, *batch_of(step, mesh))
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.9g}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(nnx.state(model_and_optimizer)))


if __name__ == "__main__":
    main()
