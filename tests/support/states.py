"""States that the multi-process tests save, restore and compare. Run on the processes.

A state is described by `Spec`s, plain data that every process turns into the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.lab import handlers
from orbax_ext.report.report import RestoreReport, publish
from orbax_ext.upstream.runtime import coordination_client

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Spec:
    """A leaf: its shape, dtype, partition spec and memory kind."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec = PartitionSpec()  # noqa: RUF009, immutable
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """A mesh over all devices of the job, in order, or over some of them."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    types: tuple[str, ...] = ()  # "auto" or "explicit" for each axis; empty: all are auto
    devices: tuple[int, ...] = ()  # numbers of the devices; empty: all of them

    def make(self) -> Mesh:
        types = [AxisType.Explicit if kind == "explicit" else AxisType.Auto for kind in self.types]
        all_devices = jax.devices()
        devices = np.array([all_devices[number] for number in self.devices] or all_devices).reshape(self.sizes)
        return Mesh(devices, self.names, axis_types=tuple(types) or (AxisType.Auto,) * len(self.names))


STRATEGIES = ["single", "spread"]  # the strategies that exchange data between processes

REPORTED_MESH = MeshSpec((1, 4, 8), ("pp", "dp", "tp"))  # from google/orbax #3184, for 4 processes x 8 devices

STATE = {
    "weights": Spec((64, 128), "bfloat16", P("tp")),
    "embedding": Spec((16, 64), "float32", P(None, "tp")),
    "bias": Spec((24,), "float32"),
    "quantized": Spec((8, 16), "int8", P("tp", None)),
    "mask": Spec((32,), "bool"),
    "step": Spec((), "int32"),
    # Too large to be packed when all replicas read: it is cut or batched.
    "layer_0": Spec((1024, 1024), "float32", P("tp")),
    "layer_1": Spec((1024, 1024), "float32", P("tp")),
}


def host_data(specs: Mapping[str, Spec], first: int = 0) -> dict[str, np.ndarray]:
    """Returns random bytes for each leaf, the same on every process. NaN payloads, -0.0 and denormals all occur.

    `first` is the seed of the first leaf.
    """
    return {name: random_array(seed, spec) for seed, (name, spec) in enumerate(sorted(specs.items()), first)}


@functools.lru_cache(maxsize=128)
def random_array(seed: int, spec: Spec) -> np.ndarray:
    """Returns random bytes, which nobody may change: a test compares with them again and again."""
    array = _random_array(seed, spec)
    array.flags.writeable = False
    return array


def _random_array(seed: int, spec: Spec) -> np.ndarray:
    dtype = jnp.dtype(spec.dtype)
    random = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return random.integers(0, 2, spec.shape).astype(bool)
    if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        info = jnp.iinfo(dtype)
        return random.integers(int(info.min), int(info.max) + 1, spec.shape).astype(dtype)
    raw = np.frombuffer(random.bytes(math.prod(spec.shape) * dtype.itemsize), np.uint8).copy()
    if spec.dtype.startswith("float4"):  # only the low four bits are used
        raw &= 0x0F
    array = raw.view(dtype).reshape(spec.shape)
    if array.size > 4 and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1:
        array.reshape(-1)[:4] = np.array([-0.0, np.inf, -np.inf, jnp.finfo(dtype).smallest_subnormal], dtype)
    return array


def shardings(specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, NamedSharding]:
    return {
        name: NamedSharding(mesh, spec.spec, **({"memory_kind": spec.memory_kind} if spec.memory_kind else {}))
        for name, spec in specs.items()
    }


def make_state(specs: Mapping[str, Spec], mesh: Mesh, first: int = 0) -> dict[str, jax.Array]:
    sharding_of, data = shardings(specs, mesh), host_data(specs, first)
    return {
        name: jax.make_array_from_callback(spec.shape, sharding_of[name], lambda index, name=name: data[name][index])
        for name, spec in specs.items()
    }


def abstract_state(specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    sharding_of = shardings(specs, mesh)
    return {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding_of[name])
        for name, spec in specs.items()
    }


def differences(restored: Mapping[str, Any], specs: Mapping[str, Spec], mesh: Mesh, first: int = 0) -> list[str]:
    """Returns where arrays differ from the request: bytes, dtype, sharding, spec, memory kind, axis types."""
    texts = []
    sharding_of, data = shardings(specs, mesh), host_data(specs, first)
    for name, spec in specs.items():
        array, sharding = restored[name], sharding_of[name]
        if array.dtype != jnp.dtype(spec.dtype):
            texts.append(f"{name}: dtype {array.dtype}, not {spec.dtype}")
        elif any(bits(shard.data) != bits(data[name][shard.index]) for shard in array.addressable_shards):
            texts.append(f"{name}: bytes")
        if array.sharding != sharding or tuple(array.sharding.spec) != tuple(sharding.spec):
            texts.append(f"{name}: sharding {array.sharding}, not {sharding}")
        elif array.sharding.mesh.axis_types != mesh.axis_types:
            texts.append(f"{name}: axis types {array.sharding.mesh.axis_types}")
        kinds = {shard.data.sharding.memory_kind for shard in array.addressable_shards}
        if spec.memory_kind and kinds != {spec.memory_kind}:
            texts.append(f"{name}: memory kind {kinds}, not {spec.memory_kind}")
    return texts


def all_differences(by_process: Sequence[list[str]]) -> list[str]:
    """Returns the differences on all processes, each with its process, for an assertion that shows them."""
    return [f"process {process}: {text}" for process, texts in enumerate(by_process) for text in texts]


def strategy_names(strategies: Iterable[str]) -> list[str]:
    """Returns the strategies of a report's leaves without the reasons."""
    return [strategy.partition(":")[0] for strategy in strategies]


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def save(path: str, specs: Mapping[str, Spec], mesh: MeshSpec = REPORTED_MESH) -> None:
    """Saves a state as step 0 with plain Orbax."""
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(make_state(specs, mesh.make())))
        manager.wait_until_finished()


def restore(
    path: str,
    specs: Mapping[str, Spec],
    mesh: MeshSpec = REPORTED_MESH,
    *,
    implementation: str = "ours",
    context: str = "none",
    knobs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Restores step 0 and returns the differences from the saved state.

    Args:
      implementation: "ours", "stock" (Orbax's single-replica handler) or "plain" (Orbax's default).
      context: The caller's mesh scope, see `in_context`.
    """
    made = mesh.make()
    abstract = abstract_state(specs, made)
    registered = handlers.registered(implementation, **(knobs or {}))
    with in_context(context, made), registered, ocp.CheckpointManager(path) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
        # Wait in the caller's own mesh scope, as a trainer would: a broken array fails here.
        jax.block_until_ready(restored)
    return differences(restored, specs, made)


def restore_exactly(
    path: str, knobs: Mapping[str, Any], specs: Mapping[str, Spec] = STATE, mesh: MeshSpec = REPORTED_MESH
) -> RestoreReport:
    """Restores step 0 with orbax_ext, asserts that it is what was saved, and returns the report."""
    publish(None)
    assert restore(path, specs, mesh, knobs=knobs) == []
    report = orbax_ext.last_report()
    assert report is not None
    return report


def in_context(kind: str, mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Enters the caller's mesh scope: `jax.set_mesh` with the training mesh or another, `with mesh`, or none."""
    if kind == "set_mesh":
        return jax.set_mesh(mesh)
    if kind == "with mesh":
        return mesh
    if kind == "other mesh":
        return jax.set_mesh(Mesh(np.array(jax.local_devices()), ("mine",)))
    return contextlib.nullcontext()


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collects the lines that absl's logger gets inside a `with` block."""
    lines: list[str] = []
    logger, collector = logging.getLogger("absl"), logging.Handler()
    collector.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(collector)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)


def knobs_for(implementation: str, mesh: MeshSpec, axis: str) -> dict[str, Any]:
    """Returns the replica axis as the argument that the stock handler or ours takes."""
    return {"replica_axis_index": mesh.names.index(axis)} if implementation == "stock" else {"replica_axis": axis}


def coordination_keys() -> list[str]:
    """Returns the keys of orbax_ext that are left on the coordination service."""
    return [key for key, _ in coordination_client().key_value_dir_get("orbax_ext/")]
