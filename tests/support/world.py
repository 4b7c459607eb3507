"""What the multi-process tests run on each process: states to save, ways to restore them, and the comparison.

A state is described by `Spec`s, plain data that every process turns into the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.lab import handlers

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Spec:
    """One leaf: its shape, dtype and partition spec, and where it shall live."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec = PartitionSpec()  # noqa: RUF009, immutable
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """A mesh over all devices of the job, in their order, or over some of them."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    types: tuple[str, ...] = ()  # "auto" or "explicit" for each axis; auto if not given
    devices: tuple[int, ...] = ()  # their numbers, if not all

    def make(self) -> Mesh:
        types = [AxisType.Explicit if kind == "explicit" else AxisType.Auto for kind in self.types]
        every = jax.devices()
        devices = np.array([every[number] for number in self.devices] or every).reshape(self.sizes)
        return Mesh(devices, self.names, axis_types=tuple(types) or (AxisType.Auto,) * len(self.names))


STRATEGIES = ["single", "spread"]  # those by which data travels

REPORTERS = MeshSpec((1, 4, 8), ("pp", "dp", "tp"))  # of google/orbax #3184, on 4 processes x 8 devices

STATE = {
    "weights": Spec((64, 128), "bfloat16", P("tp")),
    "embedding": Spec((16, 64), "float32", P(None, "tp")),
    "bias": Spec((24,), "float32"),
    "quantized": Spec((8, 16), "int8", P("tp", None)),
    "mask": Spec((32,), "bool"),
    "step": Spec((), "int32"),
    # Large enough to be cut or stacked rather than packed when all replicas read.
    "layer_0": Spec((1024, 1024), "float32", P("tp")),
    "layer_1": Spec((1024, 1024), "float32", P("tp")),
}


def host_data(specs: Mapping[str, Spec]) -> dict[str, np.ndarray]:
    """Random bytes for each leaf, so that NaN payloads, -0.0 and denormals all occur; the same on every process."""
    return {name: random_array(index, spec) for index, (name, spec) in enumerate(sorted(specs.items()))}


def random_array(seed: int, spec: Spec) -> np.ndarray:
    dtype = jnp.dtype(spec.dtype)
    random = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return random.integers(0, 2, spec.shape).astype(bool)
    if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        info = jnp.iinfo(dtype)
        return random.integers(int(info.min), int(info.max) + 1, spec.shape).astype(dtype)
    raw = np.frombuffer(random.bytes(math.prod(spec.shape) * dtype.itemsize), np.uint8).copy()
    if spec.dtype.startswith("float4"):  # only the low bits count
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


def make_state(specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, jax.Array]:
    where, data = shardings(specs, mesh), host_data(specs)
    return {
        name: jax.make_array_from_callback(spec.shape, where[name], lambda index, name=name: data[name][index])
        for name, spec in specs.items()
    }


def abstract_state(specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    where = shardings(specs, mesh)
    return {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=where[name])
        for name, spec in specs.items()
    }


def differences(restored: Mapping[str, Any], specs: Mapping[str, Spec], mesh: Mesh) -> list[str]:
    """What is not as it was saved and asked for: bytes, dtype, sharding, spec, memory kind, axis types."""
    found = []
    where, data = shardings(specs, mesh), host_data(specs)
    for name, spec in specs.items():
        array = restored[name]
        if array.dtype != jnp.dtype(spec.dtype):
            found.append(f"{name}: dtype {array.dtype}, not {spec.dtype}")
        elif any(bits(shard.data) != bits(data[name][shard.index]) for shard in array.addressable_shards):
            found.append(f"{name}: bytes")
        if array.sharding != where[name] or tuple(array.sharding.spec) != tuple(where[name].spec):
            found.append(f"{name}: sharding {array.sharding}, not {where[name]}")
        elif array.sharding.mesh.axis_types != mesh.axis_types:
            found.append(f"{name}: axis types {array.sharding.mesh.axis_types}")
        kinds = {shard.data.sharding.memory_kind for shard in array.addressable_shards}
        if spec.memory_kind and kinds != {spec.memory_kind}:
            found.append(f"{name}: memory kind {kinds}, not {spec.memory_kind}")
    return found


def ways(strategy: Mapping[str, str]) -> set[str]:
    """How the leaves of a report were restored, without the reasons."""
    return {how.partition(":")[0] for how in strategy.values()}


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def save(path: str, specs: Mapping[str, Spec], mesh: MeshSpec = REPORTERS) -> None:
    """Saves a state as step 0 with plain Orbax."""
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(make_state(specs, mesh.make())))
        manager.wait_until_finished()


def restore(
    path: str,
    specs: Mapping[str, Spec],
    mesh: MeshSpec = REPORTERS,
    *,
    how: str = "ours",
    context: str = "none",
    knobs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Restores step 0 and returns what differs from what was saved.

    `how` is "ours", "stock" (Orbax's single-replica handler) or "plain"; `context` is the caller's mesh scope.
    """
    made = mesh.make()
    abstract = abstract_state(specs, made)
    with in_context(context, made), handlers.registered(how, **(knobs or {})), ocp.CheckpointManager(path) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
        # Used as a trainer would, in the caller's own scope: a broken array shows here.
        jax.block_until_ready(restored)
    return differences(restored, specs, made)


def in_context(kind: str, mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """The caller's mesh scope: the training mesh set, entered the old way, another mesh set, or none."""
    if kind == "set_mesh":
        return jax.set_mesh(mesh)
    if kind == "with mesh":
        return mesh
    if kind == "other mesh":
        return jax.set_mesh(Mesh(np.array(jax.local_devices()), ("mine",)))
    return contextlib.nullcontext()


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that absl's logger gets meanwhile."""
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


def knobs_for(how: str, mesh: MeshSpec, axis: str) -> dict[str, Any]:
    """The replica axis in the words of the stock handler or ours."""
    return {"replica_axis_index": mesh.names.index(axis)} if how == "stock" else {"replica_axis": axis}


def all_of(values: Sequence[list[str]]) -> list[str]:
    """What differs on any process, for an assertion that shows it."""
    return [f"process {process}: {text}" for process, found in enumerate(values) for text in found]
