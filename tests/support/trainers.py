"""Small training loops that checkpoint and resume, each with its framework's own state. Run on the processes."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_ext

WIDTH, HIDDEN, BATCH = 8, 32, 16


class Trainer(Protocol):
    """A model and its optimizer on a mesh with axes dp and tp."""

    def __init__(self, mesh: Mesh) -> None: ...
    def step(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Trains on a batch and returns the loss."""

    def save(self, manager: ocp.CheckpointManager, step: int) -> None: ...
    def restore(self, manager: ocp.CheckpointManager, step: int) -> None: ...


class NnxTrainer:
    """flax NNX, with dropout: its state has typed PRNG keys."""

    def __init__(self, mesh: Mesh) -> None:
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs: nnx.Rngs) -> None:
                spread = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
                self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=spread, rngs=rngs)
                self.dropout = nnx.Dropout(0.1, rngs=rngs)
                self.down = nnx.Linear(HIDDEN, 1, rngs=rngs)

            def __call__(self, x: jax.Array) -> jax.Array:
                return self.down(self.dropout(nnx.relu(self.up(x))))[:, 0]

        @nnx.jit
        def create() -> tuple[Any, Any]:
            model = Net(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
            state = nnx.state((model, optimizer))
            nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model, optimizer

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
            optimizer.update(model, gradients)
            return loss

        self._nnx, self._step = nnx, step
        self._model_and_optimizer = create()

    def step(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self._step(*self._model_and_optimizer, x, y)

    def save(self, manager: ocp.CheckpointManager, step: int) -> None:
        manager.save(step, args=ocp.args.StandardSave(self._nnx.state(self._model_and_optimizer)))

    def restore(self, manager: ocp.CheckpointManager, step: int) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._nnx.state(self._model_and_optimizer))
        self._nnx.update(self._model_and_optimizer, manager.restore(step, args=ocp.args.StandardRestore(abstract)))


class LinenTrainer:
    """flax Linen with a `TrainState`."""

    def __init__(self, mesh: Mesh) -> None:
        import flax.linen as nn
        from flax.training import train_state

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                spread = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tp"))
                x = nn.relu(nn.Dense(HIDDEN, kernel_init=spread)(x))
                return nn.Dense(1)(x)[:, 0]

        net = Net()

        def create() -> train_state.TrainState:
            params = net.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
            return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-2))

        def step(state: train_state.TrainState, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(lambda params: jnp.mean((state.apply_fn(params, x) - y) ** 2))(
                state.params
            )
            return state.apply_gradients(grads=gradients), loss

        shardings = nn.get_sharding(jax.eval_shape(create), mesh)
        self._state = nn.unbox(jax.jit(create, out_shardings=shardings)())
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(jax.tree.map(_sharding, self._state), None))

    def step(self, x: jax.Array, y: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x, y)
        return loss

    def save(self, manager: ocp.CheckpointManager, step: int) -> None:
        manager.save(step, args=ocp.args.PyTreeSave(self._state))

    def restore(self, manager: ocp.CheckpointManager, step: int) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state)
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        self._state = manager.restore(step, args=args)


class EquinoxTrainer:
    """Equinox: the model is a tree with arrays and functions in it; only the arrays are checkpointed."""

    def __init__(self, mesh: Mesh) -> None:
        import equinox as eqx

        tx = optax.adamw(1e-2)

        def create() -> Any:
            model = eqx.nn.MLP(WIDTH, "scalar", HIDDEN, depth=2, key=jax.random.key(0))
            arrays, self._static = eqx.partition(model, eqx.is_array)
            return arrays, tx.init(arrays)

        def loss(arrays: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((jax.vmap(eqx.combine(arrays, self._static))(x) - y) ** 2)

        def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
            arrays, momenta = state
            value, gradients = jax.value_and_grad(loss)(arrays, x, y)
            updates, momenta = tx.update(gradients, momenta, arrays)
            return (eqx.apply_updates(arrays, updates), momenta), value

        def spread(leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, P("tp") if leaf.shape[:1] == (HIDDEN,) else P())

        shardings = jax.tree.map(spread, jax.eval_shape(create))
        self._state = jax.jit(create, out_shardings=shardings)()
        self._step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

    def step(self, x: jax.Array, y: jax.Array) -> jax.Array:
        self._state, loss = self._step(self._state, x, y)
        return loss

    def save(self, manager: ocp.CheckpointManager, step: int) -> None:
        manager.save(step, args=ocp.args.StandardSave(self._state))

    def restore(self, manager: ocp.CheckpointManager, step: int) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state)
        self._state = manager.restore(step, args=ocp.args.StandardRestore(abstract))


TRAINERS: dict[str, type[Trainer]] = {"nnx": NnxTrainer, "linen": LinenTrainer, "equinox": EquinoxTrainer}


@dataclasses.dataclass(frozen=True)
class History:
    """A run on one process: the loss of each step, bit for bit, and the strategy that restored each leaf."""

    start: int
    losses: dict[int, str]
    strategy: dict[str, str]


def train_all(path: str, steps: int, save_at: int, histories: str | None = None) -> dict[str, History]:
    """Trains with each framework in turn. With `histories`, writes the result to that file and waits to be killed."""
    by_framework = {name: train(name, f"{path}/{name}", steps, save_at) for name in TRAINERS}
    if histories is not None:
        mine = pathlib.Path(f"{histories}{jax.process_index()}")
        mine.with_suffix(".unfinished").write_bytes(pickle.dumps(by_framework))
        mine.with_suffix(".unfinished").rename(mine)
        time.sleep(600)
    return by_framework


def train(framework: str, path: str, steps: int, save_at: int) -> History:
    """Trains from the latest checkpoint or from scratch, and saves a checkpoint after `save_at` steps."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, -1), ("dp", "tp"))
    with (
        orbax_ext.registered(strategy="spread"),
        jax.set_mesh(mesh),
        ocp.CheckpointManager(path) as manager,
    ):
        trainer = TRAINERS[framework](mesh)
        start = manager.latest_step() or 0
        if start:
            trainer.restore(manager, start)
        losses = {}
        for step in range(start, steps):
            losses[step] = float(trainer.step(*_batch(step, mesh))).hex()
            if step + 1 == save_at:
                trainer.save(manager, step + 1)
    report = orbax_ext.last_report() if start else None
    return History(start, losses, report.strategy if report else {})


def _batch(step: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(step)
    x = random.standard_normal((BATCH, WIDTH), np.float32)
    y = np.sin(x.sum(axis=1))
    sharding = NamedSharding(mesh, P("dp"))
    return tuple(jax.make_array_from_callback(a.shape, sharding, lambda index, a=a: a[index]) for a in (x, y))


def _sharding(array: jax.Array) -> Any:
    return array.sharding
