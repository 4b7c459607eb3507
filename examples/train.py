"""A small training program on plain JAX and Orbax, which saves as it goes and resumes where it stopped.

    srun python -m orbax_ext run train.py CHECKPOINTS [--steps 200] [--save-every 20]

It does not know orbax_ext: `python -m orbax_ext run` has its restores go through orbax_ext. Without that it runs too.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH = 256
BATCH = 64
SHARDED = PartitionSpec(None, "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", help="a folder that all processes see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()

    jax.distributed.initialize()  # finds the other processes under Slurm, Open MPI and Kubernetes
    # Each process has a whole copy of the model, sharded over its devices.
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    options = ocp.CheckpointManagerOptions(save_interval_steps=args.save_every, max_to_keep=3)
    with jax.set_mesh(mesh), ocp.CheckpointManager(args.checkpoints, options=options) as manager:
        state, done = first_or_latest(manager, mesh)
        for step in range(done + 1, args.steps + 1):
            state, loss = train_step(state, step)
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.9g}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))


def first_or_latest(manager, mesh):
    """Returns the state to go on with, and the number of steps that it has behind it."""
    sharding = NamedSharding(mesh, SHARDED)
    latest = manager.latest_step()
    if latest is None:
        return jax.jit(first_state, out_shardings=sharding)(), 0
    shapes = jax.eval_shape(first_state)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    return manager.restore(latest, args=ocp.args.StandardRestore(abstract)), latest


def first_state():
    keys = dict(zip(("into", "out"), jax.random.split(jax.random.key(0)), strict=True))
    weights = {name: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for name, key in keys.items()}
    return {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights)}


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, step):
    inputs = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (BATCH, WIDTH))
    inputs = jax.lax.with_sharding_constraint(inputs, PartitionSpec("data"))
    loss, gradients = jax.value_and_grad(loss_of)(state["weights"], inputs)
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, state["momentum"], gradients)
    weights = jax.tree.map(lambda weight, change: weight - 0.5 * change, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum}, loss


def loss_of(weights, inputs):
    """Returns how far the network's output is from its input reversed, on average."""
    outputs = jnp.tanh(inputs @ weights["into"]) @ weights["out"]
    return jnp.mean((outputs - inputs[:, ::-1]) ** 2)


if __name__ == "__main__":
    main()
