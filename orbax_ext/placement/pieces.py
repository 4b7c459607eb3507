"""Makes a global array of one leaf from this process's own copy, device by device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from orbax_ext.placement import specs
from orbax_ext.upstream.runtime import join_arrays


def is_array(leaf: Any) -> bool:
    """Returns whether devices can hold this leaf. Python numbers, strings and other objects are not arrays."""
    if isinstance(leaf, jax.Array):
        return True
    # JAX has no arrays of strings, objects or dates.
    kinds = (np.bool_, np.number)
    return isinstance(leaf, np.ndarray | np.generic) and any(jax.dtypes.issubdtype(leaf.dtype, kind) for kind in kinds)


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def dtype_on_device(leaf: Any) -> Any:
    """Returns the dtype that a leaf has on devices: float64 becomes float32 unless `jax_enable_x64` is set."""
    return leaf.dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(leaf.dtype)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/") or "(the whole tree)", leaf) for path, leaf in leaves
    ]


def map_named(function: Any, tree: Any, *others: list[Any]) -> Any:
    """Maps `function(name, leaf, ...)` over a tree; `others` are lists in the order of the tree's leaves."""
    structure = jax.tree.structure(tree)
    named = named_leaves(tree)
    mapped = [function(name, leaf, *rest) for (name, leaf), *rest in zip(named, *others, strict=True)]
    return jax.tree.unflatten(structure, mapped)


def refuse_tracer(caller: str, name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{caller}: leaf {name} is being traced: found inside jit, expected outside of it, where arrays have "
            "data. Inside jit use match_sharding."
        )


def place(caller: str, name: str, leaf: Any, sharding: Sharding) -> jax.Array:
    """Returns a global array with this sharding; every process puts its own part on its own devices."""
    refuse_tracer(caller, name, leaf)
    if is_key(leaf):
        # Wrapping and unwrapping whole keys changes only their type: no program runs.
        data = place(caller, name, jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    shape: specs.Shape = tuple(leaf.shape)
    held: dict[Any, dict[Any, Any]] = {}  # by box and device, the parts that devices already hold
    if isinstance(leaf, jax.Array):
        _require_own_copy(caller, name, leaf)
        for shard in leaf.addressable_shards:
            held.setdefault(specs.box(shard.index, shape), {})[shard.device] = shard.data
    require_fit(caller, name, shape, sharding)

    def piece(device: Any, index: specs.Index) -> Any:
        copies = held.get(specs.box(index, shape))
        if copies:
            return copies[device] if device in copies else next(iter(copies.values()))
        return np.asarray(leaf)[index]  # JAX copies an array to the host once and keeps the copy

    pieces = [piece(device, index) for device, index in sharding.addressable_devices_indices_map(shape).items()]
    return assemble(shape, dtype_on_device(leaf), sharding, pieces, weak_type=getattr(leaf, "weak_type", False))


def assemble(
    shape: specs.Shape, dtype: Any, sharding: Sharding, pieces: list[Any], weak_type: bool = False
) -> jax.Array:
    """Puts one piece on each of this process's devices, in the order of the sharding's index map, and joins them."""
    devices = list(sharding.addressable_devices_indices_map(shape))
    single = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
    return join_arrays(shape, dtype, sharding, jax.device_put(pieces, single), weak_type=weak_type)


def host_copy(caller: str, name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """Returns a leaf's values in this process's memory; for keys, their data."""
    refuse_tracer(caller, name, leaf)
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if isinstance(data, jax.Array):
        _require_own_copy(caller, name, data)
    return np.asarray(data)


def require_fit(caller: str, name: str, shape: specs.Shape, sharding: Sharding) -> None:
    """Raises ValueError unless the sharding can cut an array of this shape evenly."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"{caller}: leaf {name} on process {jax.process_index()}: expected a shape that {sharding} can cut evenly, "
            f"found {shape}. Shard another dimension, or pad the array."
        ) from error


def host_chunks(array: np.ndarray[Any, Any], chunk_bytes: int = 1 << 24) -> Iterator[bytes | memoryview]:
    """Yields the bytes of an array in order, in chunks, whatever its layout in memory."""
    if array.ndim == 0 or array.size == 0:
        yield array.tobytes()
        return
    rows = max(1, chunk_bytes // max(1, array.nbytes // len(array)))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).view(np.uint8).reshape(-1).data


def _require_own_copy(caller: str, name: str, leaf: jax.Array) -> None:
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(
            f"{caller}: leaf {name} is spread over several processes; expected data of which process "
            f"{jax.process_index()} has a whole copy, found {leaf.sharding}. To move it use match_sharding."
        )
