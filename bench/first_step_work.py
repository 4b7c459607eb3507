"""The functions that the benchmark of the first step runs on every process."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import serialize_executable

import orbax_ext
from bench import network, work
from bench.scenarios import Scenario
from orbax_ext.lab import handlers
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from orbax_ext.upstream.runtime import coordination_client

_WIDTH = 4  # columns of a leaf that a layer uses: the step itself is quick, whatever it takes to compile
_RATE = 0.01
_START_LIMIT = 120  # seconds for all processes to be ready
_COMPILE_LIMIT = 300  # seconds
_ON_ONE_CORE = {"xla_cpu_parallel_codegen_split_count": 1}

State = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class FirstStep:
    """One start of a training program, as one process measured it."""

    started: float
    ended: float
    compiled: float  # seconds of lowering and compiling
    asked: float  # when it called for the restore, or for `result`
    restored: float  # when that was there
    stepped: float  # seconds of the step
    loss: bytes
    idle_seconds: float  # of all cores of the machine


def first_step(
    scenario: Scenario, path: str, way: str, layers: int, url: str, *, one_compiles: bool = False
) -> FirstStep:
    """Restores, compiles the step and runs it. `way` says how the first two are done, or that only one of them is."""
    abstract = _abstract(scenario)
    args = ocp.args.StandardRestore(abstract)
    plain = ocp.type_handlers.ArrayHandler(array_metadata_store=ArrayMetadataStore())
    registered: Any = handlers.installed(plain) if way.startswith("plain") else orbax_ext.registered(progress=False)
    with work.served_from(path, url), registered, ocp.CheckpointManager(path) as manager:
        # Not `sync_global_devices`: it runs a program, and each start has to connect by itself.
        coordination_client().wait_at_barrier(f"start {way} {layers}", timeout_in_ms=_START_LIMIT * 1000)
        idle, started = network.idle_seconds(), time.monotonic()
        watch, step, state, pending, loss = _Watch(), None, None, None, b""
        if "restore_async" in way:
            exchange: Any = "background" if "background" in way else "result"
            pending = orbax_ext.restore_async(manager, 0, args=args, exchange=exchange)
        elif way != "compile":
            state = watch.time("restore", lambda: jax.block_until_ready(manager.restore(0, args=args)))
        if not way.endswith("restore"):
            program = pathlib.Path(path).with_name(f"program of {layers} layers") if one_compiles else None
            step = watch.time("compile", lambda: compile_step(abstract, layers, program))
        if pending is not None:
            state = watch.time("restore", lambda: jax.block_until_ready(pending.result()))
        if step is not None and state is not None:
            loss = watch.time("step", lambda: np.asarray(step(state)[1]).tobytes())
        ended, idle = time.monotonic(), network.idle_seconds() - idle
    asked, restored = watch.times["restore"]
    return FirstStep(started, ended, watch.seconds("compile"), asked, restored, watch.seconds("step"), loss, idle)


class _Watch:
    """Measures the parts of a start."""

    def __init__(self) -> None:
        self.times: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def seconds(self, part: str) -> float:
        began, ended = self.times[part]
        return ended - began

    def time(self, part: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return work()
        finally:
            self.times[part] = began, time.monotonic()


def compile_step(abstract: dict[str, jax.ShapeDtypeStruct], layers: int, program: pathlib.Path | None = None) -> Any:
    """Compiles a step of unrolled layers, forward and backward, with the update of the weights.

    With `program`, a file, only process 0 compiles, on one core; the others load what it has compiled.
    """
    if program is None:
        return _lowered_step(abstract, layers).compile()
    client = coordination_client()
    if jax.process_index() == 0:
        # What comes from JAX's persistent cache can't be serialized again: its functions would not be found.
        shortest = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
        try:
            step = _lowered_step(abstract, layers).compile(compiler_options=_ON_ONE_CORE)
        finally:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
        program.write_bytes(pickle.dumps(serialize_executable.serialize(step)))
        client.key_value_set(str(program), "written")
        return step
    client.blocking_key_value_get(str(program), _COMPILE_LIMIT * 1000)
    return serialize_executable.deserialize_and_load(*pickle.loads(program.read_bytes()))


def _lowered_step(abstract: dict[str, jax.ShapeDtypeStruct], layers: int) -> jax.stages.Lowered:
    mix = np.sin(np.arange(_WIDTH**2, dtype=np.float32)).reshape(_WIDTH, _WIDTH)

    @jax.jit  # traced once; XLA compiles it as often as it is called
    def layer(weight: jax.Array, hidden: jax.Array, scale: float) -> jax.Array:
        # Random bits are no weights: bring them into a range in which nothing overflows.
        weight = jnp.nan_to_num(weight.astype(jnp.float32), posinf=1.0, neginf=-1.0)
        weight = jnp.tanh(weight) * scale
        return jnp.tanh((hidden * weight) @ mix) + hidden  # row by row: devices exchange nothing but gradients and loss

    def loss_of(weights: State) -> jax.Array:
        hidden = jnp.ones((len(weights[min(weights)]), _WIDTH), jnp.float32)
        for number, name in zip(range(layers), _cycle(weights), strict=False):
            hidden = layer(weights[name], hidden, 1 / (8.0 + number))
        return jnp.mean(hidden**2)

    def step(state: State) -> tuple[State, jax.Array]:
        used = {name: leaf[:, :_WIDTH] for name, leaf in state.items()}
        loss, gradients = jax.value_and_grad(loss_of)(used)
        new = {name: weight - (_RATE * gradients[name]).astype(weight.dtype) for name, weight in used.items()}
        return {name: jax.lax.dynamic_update_slice(leaf, new[name], (0, 0)) for name, leaf in state.items()}, loss

    return jax.jit(step, donate_argnums=0).lower(abstract)


def _cycle(weights: State) -> Any:
    names = sorted(weights)
    while True:
        yield from names


def compile_seconds(scenario: Scenario, layers: int, program: str) -> float:
    """Compiles on all processes at once, or on one of them for all; returns the seconds that this one took."""
    coordination_client().wait_at_barrier(f"compile {layers}", timeout_in_ms=_START_LIMIT * 1000)
    started = time.monotonic()
    compile_step(_abstract(scenario), layers, pathlib.Path(program) if program else None)
    return time.monotonic() - started


def _abstract(scenario: Scenario) -> dict[str, jax.ShapeDtypeStruct]:
    leaf = jax.ShapeDtypeStruct(scenario.leaf, jnp.bfloat16, sharding=work.make_sharding(scenario))
    return dict.fromkeys(work.leaf_names(scenario), leaf)
