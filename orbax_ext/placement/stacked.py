"""pmap's way of holding state: arrays with a leading axis of devices, each row a copy of the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_ext.placement import agree, pieces, specs


def stack(tree: Any, devices: Sequence[Any] | None = None) -> Any:
    """The tree's arrays with a leading axis of devices, each device holding one copy; what pmap works on.

    `devices` are this process's own unless given; with those of all processes the arrays are global. Other leaves
    pass through. No two copies meet in one place.
    """
    placed = _devices("stack", jax.local_devices() if devices is None else devices)

    def stacked(name: str, leaf: Any) -> Any:
        return _rows("stack", name, [leaf] * len(placed), placed, "devices") if pieces.is_array(leaf) else leaf

    return pieces.map_named(stacked, tree)


def unstack(tree: Any, *, check: bool = False) -> Any:
    """The one logical copy out of arrays whose rows, one to a device, are copies of the same thing.

    What `x[0]` gives, on the same devices, but taken from this process's own rows: nothing is gathered and no
    program runs. Leaves that are no arrays pass through. With `check`, the rows are compared first, on this process
    and between all processes.
    """
    arrays = [(name, leaf) for name, leaf in pieces.named_leaves(tree) if pieces.is_array(leaf)]
    for name, leaf in arrays:
        _require_stacked(name, leaf)
    if check:
        agree.require_same("unstack", (_compared(name, leaf) for name, leaf in arrays))
    return pieces.map_named(lambda name, leaf: _first_row(leaf) if pieces.is_array(leaf) else leaf, tree)


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """As `jax.device_put_replicated` was: a copy of each leaf on each device, under a new leading axis.

    Unlike it, this takes devices of other processes too, and does not send every copy through the first device.
    """
    placed = _devices("device_put_replicated", devices)

    def put(name: str, leaf: Any) -> jax.Array:
        rows = [_array_like("device_put_replicated", name, leaf)] * len(placed)
        return _rows("device_put_replicated", name, rows, placed, "_device_put_replicated")

    return pieces.map_named(put, x)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """As `jax.device_put_sharded` was: the n-th shard on the n-th device, under a new leading axis.

    Unlike it, this takes devices of other processes too: each process puts the shards of its own devices.
    """
    if not isinstance(shards, Sequence):
        raise TypeError(f"device_put_sharded: expected a sequence of shards, found {type(shards).__name__}.")
    placed = _devices("device_put_sharded", devices)
    if len(shards) != len(placed):
        raise ValueError(
            f"device_put_sharded: expected a shard for each of {len(placed)} devices, found {len(shards)}."
        )
    columns = zip(*(jax.tree.structure(shards[0]).flatten_up_to(each) for each in shards), strict=True)

    def put(name: str, _: Any, rows: Sequence[Any]) -> jax.Array:
        arrays = [_array_like("device_put_sharded", name, row) for row in rows]
        kinds = {(row.shape, pieces.dtype_on_device(row)): number for number, row in enumerate(arrays)}
        if len(kinds) > 1:
            (first, at), (second, other), *_ = kinds.items()
            raise ValueError(
                f"device_put_sharded: leaf {name}: expected shards of one shape and dtype, found {first} for device "
                f"{at} and {second} for device {other}."
            )
        return _rows("device_put_sharded", name, arrays, placed, "_device_put_sharded")

    return pieces.map_named(put, shards[0], list(columns))


def _devices(what: str, devices: Sequence[Any]) -> list[Any]:
    if not isinstance(devices, Sequence) or not devices or len(set(devices)) != len(devices):
        raise ValueError(f"{what}: expected a sequence of one or more different devices, found {devices!r}.")
    return list(devices)


def _array_like(what: str, name: str, leaf: Any) -> Any:
    """The old functions made arrays of Python numbers too, and refused everything else."""
    if pieces.is_array(leaf):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return pieces.PythonNumber.of(leaf)
    raise TypeError(f"{what}: leaf {name}: expected an array or a number, found {type(leaf).__name__}: {leaf!r}.")


def _rows(what: str, name: str, rows: Sequence[Any], devices: list[Any], axis: str) -> jax.Array:
    """A stacked array of these rows, one to a device; only those of this process's devices are looked at."""
    first = rows[0]
    sharding = NamedSharding(Mesh(np.array(devices), (axis,)), PartitionSpec(axis))
    own = [pieces.host_copy(what, name, row) for row, device in zip(rows, devices, strict=True) if _is_local(device)]
    if pieces.is_key(first):
        shape = (len(devices), *jax.random.key_data(first).shape)
        data = pieces.assemble(shape, np.dtype(np.uint32), sharding, [row[None] for row in own])
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(first))
    weak = bool(getattr(first, "weak_type", False))
    return pieces.assemble(
        (len(devices), *first.shape),
        pieces.dtype_on_device(first),
        sharding,
        [row[None] for row in own],
        weak_type=weak,
    )


def _is_local(device: Any) -> bool:
    return bool(device.process_index == jax.process_index())


def _require_stacked(name: str, leaf: Any) -> None:
    pieces.refuse_tracer("unstack", name, leaf)
    if isinstance(leaf, jax.Array):
        good = leaf.ndim > 0 and leaf.sharding.shard_shape(leaf.shape)[0] == 1
        found = f"shape {leaf.shape} with {leaf.sharding}"
    else:
        good, found = leaf.ndim > 0, f"a host array of shape {leaf.shape}"
    if not good:
        raise ValueError(
            f"unstack: leaf {name}: expected a leading axis with one row to a device, found {found}. "
            "If the leaf is not stacked, leave it out; if it is a batch, index it."
        )


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if pieces.is_key(leaf) else leaf


def _first_row(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf[0]
    if pieces.is_key(leaf):
        return jax.random.wrap_key_data(_first_row(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    shape, target = leaf.shape[1:], _sharding_of_row(leaf)
    rows: dict[Any, Any] = {}
    for shard in leaf.addressable_shards:
        place = specs.box(shard.index[1:], shape)
        if place not in rows:
            rows[place] = np.asarray(shard.data)[0]
    indices = target.addressable_devices_indices_map(shape).values()
    own = [rows[specs.box(index, shape)] for index in indices]
    return pieces.assemble(shape, leaf.dtype, target, own, weak_type=leaf.weak_type)


def _sharding_of_row(leaf: jax.Array) -> Sharding:
    old = leaf.sharding
    if isinstance(old, NamedSharding):
        return NamedSharding(old.mesh, PartitionSpec(*old.spec[1:]), memory_kind=old.memory_kind)
    by_row = sorted(old.devices_indices_map(leaf.shape).items(), key=lambda item: item[1][0].start or 0)
    mesh = Mesh(np.array([device for device, _ in by_row]), ("devices",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=old.memory_kind)


def _compared(name: str, leaf: Any) -> agree.Item:
    """What this process's rows say, and whether they say the same."""
    data = _data(leaf)
    kind = f"rows of shape {leaf.shape[1:]}, dtype {leaf.dtype}"
    if isinstance(data, jax.Array):
        shape = data.shape[1:]
        copies = [
            (str(s.device), specs.box(s.index[1:], shape), np.asarray(s.data)[0]) for s in data.addressable_shards
        ]
        whole = data.sharding.shard_shape(data.shape)[1:] == shape
    else:
        copies = [(f"row {number}", (), row) for number, row in enumerate(data)]
        whole = True
    first: dict[Any, tuple[str, str]] = {}
    for place, part, row in copies:
        found = agree.digest_of_array(row)
        at, expected = first.setdefault(part, (place, found))
        if found != expected:
            fault = f"expected equal rows, found different ones on {at} and {place}"
            return agree.Item(name, kind, found, fault)
    # Rows that are cut up further lie differently on each process: only what one process holds is compared.
    held = " ".join(found for _, found in first.values()) if whole else ""
    return agree.Item(name, f"{kind}, digest {held}", agree.digest(f"{kind} {held}".encode()))
