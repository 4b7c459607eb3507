"""The training program of train.py, which compiles its step while the checkpoint is being read.

    srun python overlap.py CHECKPOINTS [--steps 200] [--save-every 20]

`orbax_ext.restore_async` begins to read into host memory and returns at once. `result()` takes the state.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext

WIDTH = 256
BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", help="a folder that all processes see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()

    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    shapes = jax.eval_shape(first_state)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    options = ocp.CheckpointManagerOptions(save_interval_steps=args.save_every, max_to_keep=3)
    with (
        orbax_ext.registered(),
        jax.set_mesh(mesh),
        ocp.CheckpointManager(args.checkpoints, options=options) as manager,
    ):
        done, pending = manager.latest_step() or 0, None
        if done:
            pending = orbax_ext.restore_async(manager, done, args=ocp.args.StandardRestore(abstract))

        compiled = jax.jit(train_step, donate_argnums=0).lower(abstract, done).compile()  # meanwhile

        state = pending.result() if pending else jax.jit(first_state, out_shardings=sharding)()
        for step in range(done + 1, args.steps + 1):
            state, loss = compiled(state, step)
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.9g}", flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))


def first_state():
    keys = dict(zip(("into", "out"), jax.random.split(jax.random.key(0)), strict=True))
    weights = {name: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for name, key in keys.items()}
    return {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights)}


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
