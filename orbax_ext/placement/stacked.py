"""The stacked state of pmap: arrays with a leading axis of devices, whose rows are all equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_ext.placement import agree, pieces, specs


def stack(tree: Any, devices: Sequence[Any] | None = None) -> Any:
    """Returns the tree's arrays with a leading axis of devices, one row per device, as pmap takes them.

    `devices` are this process's own unless given; with those of all processes the arrays are global. Other leaves are
    kept. The stacked array is never built in one place.
    """
    placed = _devices("stack", jax.local_devices() if devices is None else devices)

    def stacked(name: str, leaf: Any) -> Any:
        if not pieces.is_array(leaf):
            return leaf
        return _rows("stack", name, [leaf] * len(placed), placed, "devices", _is_weak(leaf))

    return pieces.map_named(stacked, tree)


def unstack(tree: Any, *, check: bool = False) -> Any:
    """Returns the tree's stacked arrays without their leading axis; the rows, one per device, must be equal.

    The result is that of `x[0]`, on the same devices, but made from this process's own rows: nothing is gathered and no
    program runs. Leaves that are not arrays are kept. With `check`, the rows are compared first, on this process and
    between all processes.
    """
    arrays = [(name, leaf) for name, leaf in pieces.named_leaves(tree) if pieces.is_array(leaf)]
    for name, leaf in arrays:
        _require_stacked(name, leaf)
    if check:
        agree.require_same("unstack", (_fingerprint(name, leaf) for name, leaf in arrays))
    return pieces.map_named(lambda name, leaf: _unstacked(leaf) if pieces.is_array(leaf) else leaf, tree)


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Puts a copy of each leaf on each device, under a new leading axis, as `jax.device_put_replicated` did.

    Unlike that, this also takes devices of other processes, and does not send every copy through the first device.
    """
    placed = _devices("device_put_replicated", devices)

    def put(name: str, leaf: Any) -> jax.Array:
        rows = [_array_like("device_put_replicated", name, leaf)] * len(placed)
        return _rows("device_put_replicated", name, rows, placed, "_device_put_replicated", _is_weak(leaf))

    return pieces.map_named(put, x)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Puts the n-th shard on the n-th device, under a new leading axis, as `jax.device_put_sharded` did.

    Unlike that, this also takes devices of other processes: each process puts the shards of its own devices.
    """
    if not isinstance(shards, Sequence):
        raise TypeError(f"device_put_sharded: expected a sequence of shards, found {type(shards).__name__}.")
    placed = _devices("device_put_sharded", devices)
    if len(shards) != len(placed):
        raise ValueError(
            f"device_put_sharded: expected a shard for each of {len(placed)} devices, found {len(shards)}."
        )
    columns = zip(*(jax.tree.structure(shards[0]).flatten_up_to(shard) for shard in shards), strict=True)

    def put(name: str, _: Any, rows: Sequence[Any]) -> jax.Array:
        arrays = [_array_like("device_put_sharded", name, row) for row in rows]
        kinds = {(row.shape, pieces.dtype_on_device(row)): number for number, row in enumerate(arrays)}
        if len(kinds) > 1:
            (first, at), (second, other), *_ = kinds.items()
            raise ValueError(
                f"device_put_sharded: leaf {name}: expected shards of one shape and dtype, found {first} for device "
                f"{at} and {second} for device {other}."
            )
        return _rows("device_put_sharded", name, arrays, placed, "_device_put_sharded", _is_weak(rows[0]))

    return pieces.map_named(put, shards[0], list(columns))


def _devices(caller: str, devices: Sequence[Any]) -> list[Any]:
    if not isinstance(devices, Sequence) or not devices or len(set(devices)) != len(devices):
        raise ValueError(f"{caller}: expected a sequence of one or more different devices, found {devices!r}.")
    return list(devices)


def _array_like(caller: str, name: str, leaf: Any) -> Any:
    """Returns an array or number as an array; raises TypeError for all else, as JAX's functions did."""
    if pieces.is_array(leaf):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    raise TypeError(f"{caller}: leaf {name}: expected an array or a number, found {type(leaf).__name__}: {leaf!r}.")


def _is_weak(leaf: Any) -> bool:
    """Returns whether JAX lets other dtypes win over the leaf's: Python numbers are weak, booleans are not."""
    return bool(getattr(leaf, "weak_type", not pieces.is_array(leaf) and not isinstance(leaf, bool)))


def _rows(caller: str, name: str, rows: Sequence[Any], devices: list[Any], axis: str, weak_type: bool) -> jax.Array:
    """Returns a stacked array of these rows, one per device; only rows for this process's devices are used."""
    first, here = rows[0], jax.process_index()
    sharding = NamedSharding(Mesh(np.array(devices), (axis,)), PartitionSpec(axis))
    own = [row for row, device in zip(rows, devices, strict=True) if device.process_index == here]
    parts = [pieces.host_copy(caller, name, row)[None] for row in own]
    if pieces.is_key(first):
        shape = (len(devices), *jax.random.key_data(first).shape)
        data = pieces.assemble(shape, np.dtype(np.uint32), sharding, parts)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(first))
    shape = (len(devices), *first.shape)
    return pieces.assemble(shape, pieces.dtype_on_device(first), sharding, parts, weak_type=weak_type)


def _require_stacked(name: str, leaf: Any) -> None:
    pieces.refuse_tracer("unstack", name, leaf)
    if isinstance(leaf, jax.Array):
        good = leaf.ndim > 0 and leaf.sharding.shard_shape(leaf.shape)[0] == 1
        found = f"shape {leaf.shape} with {leaf.sharding}"
    else:
        good, found = leaf.ndim > 0, f"a host array of shape {leaf.shape}"
    if not good:
        raise ValueError(
            f"unstack: leaf {name}: expected a leading axis with one row per device, found {found}. "
            "If the leaf is not stacked, leave it out; if it is a batch, index it."
        )


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if pieces.is_key(leaf) else leaf


def _unstacked(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf[0]
    if pieces.is_key(leaf):
        return jax.random.wrap_key_data(_unstacked(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return first_row(leaf, _sharding_of_row(leaf))


def first_row(array: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns a stacked array's row with this sharding, from the first of the rows that this process has."""
    shape = array.shape[1:]
    rows: dict[Any, Any] = {}  # or parts of rows, by box
    for shard in array.addressable_shards:
        part = specs.box(shard.index[1:], shape)
        if part not in rows:
            rows[part] = np.asarray(shard.data)[0]
    own = [rows[specs.box(index, shape)] for index in sharding.addressable_devices_indices_map(shape).values()]
    return pieces.assemble(shape, array.dtype, sharding, own, weak_type=array.weak_type)


def _sharding_of_row(leaf: jax.Array) -> Sharding:
    old = leaf.sharding
    if isinstance(old, NamedSharding):
        return NamedSharding(old.mesh, PartitionSpec(*old.spec[1:]), memory_kind=old.memory_kind)
    by_row = sorted(old.devices_indices_map(leaf.shape).items(), key=lambda item: item[1][0].start or 0)
    mesh = Mesh(np.array([device for device, _ in by_row]), ("devices",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=old.memory_kind)


def _fingerprint(name: str, leaf: Any) -> agree.LeafFingerprint:
    """Returns the fingerprint of this process's rows; its problem says which of them differ."""
    data = _data(leaf)
    description = f"rows of shape {leaf.shape[1:]}, dtype {leaf.dtype}"
    digests: dict[Any, tuple[str, str]] = {}  # of each part of a row: where it was seen first, and its digest
    for place, part, row in _rows_here(data):
        digest = agree.digest_of_array(row)
        first_place, expected = digests.setdefault(part, (place, digest))
        if digest != expected:
            problem = f"expected equal rows, found different ones on {first_place} and {place}"
            return agree.LeafFingerprint(name, description, digest, problem)
    whole = not isinstance(data, jax.Array) or data.sharding.shard_shape(data.shape)[1:] == data.shape[1:]
    # Each process has other parts of rows that are sharded too, so those are compared on each process alone.
    content = " ".join(digest for _, digest in digests.values()) if whole else ""
    digest = agree.digest(f"{description} {content}".encode())
    return agree.LeafFingerprint(name, f"{description}, digest {content}", digest)


def _rows_here(data: Any) -> Iterator[tuple[str, Any, np.ndarray[Any, Any]]]:
    """Yields the place, the part and the values of each row, or part of a row, that this process has."""
    if not isinstance(data, jax.Array):
        yield from ((f"row {number}", (), row) for number, row in enumerate(data))
        return
    for shard in data.addressable_shards:
        yield str(shard.device), specs.box(shard.index[1:], data.shape[1:]), np.asarray(shard.data)[0]
