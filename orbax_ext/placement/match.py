"""Gives arrays exactly the shardings asked for: with explicit mesh axes JAX compares spellings, not layouts."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from orbax_ext import mesh as mesh_lib
from orbax_ext.placement import pieces, put, specs
from orbax_ext.upstream.runtime import join_arrays, tracing


def match_sharding(tree: Any, like: Any) -> Any:
    """Returns the tree's arrays with exactly the shardings of `like`, in and outside of jit, for all mesh axis types.

    `like` has the structure of the tree or is a prefix of it, and holds arrays, ShapeDtypeStructs or shardings. Where
    it has no sharding, the array keeps its own. Where only the spelling differs (axes of size 1, trailing Nones,
    another mesh over the same devices), no data moves and no program runs: the result shares the array's buffers.
    """
    return pieces.map_named(_match, tree, put.broadcast("match_sharding", tree, like))


def _match(name: str, leaf: Any, like: Any) -> Any:
    if not pieces.is_array(leaf):
        return leaf
    if isinstance(like, jax.core.Tracer):
        return _match_traced(name, leaf, jax.typeof(like).sharding)
    target = put.sharding_of(like)
    if target is None:
        return leaf
    if isinstance(leaf, jax.core.Tracer) or tracing():
        return _match_traced(name, leaf, target)
    return _match_concrete(name, leaf, target)


def _match_concrete(name: str, leaf: Any, target: Sharding) -> jax.Array:
    target = _with_devices(name, leaf, target)
    if not isinstance(leaf, jax.Array):
        return pieces.place("match_sharding", name, leaf, target)
    if leaf.sharding == target:
        return leaf
    pieces.require_fit("match_sharding", name, leaf.shape, target)
    if same_placement(leaf.sharding, target, leaf.shape):
        return _respelled(leaf, target)
    local = leaf.is_fully_addressable and target.is_fully_addressable
    if not local and leaf.sharding.device_set != target.device_set:
        return pieces.place("match_sharding", name, leaf, target)  # from the copy that this process has
    # Programs run in the devices' own memory: JAX 0.9.0 can't compile them for other memory kinds on CPU.
    kind = next(iter(target.device_set)).default_memory().kind
    on_device = _respelled(leaf, leaf.sharding.with_memory_kind(kind))
    # device_put compiles a program, which fails under a mesh that the caller has set and that has other devices.
    with mesh_lib.scope(target.mesh) if isinstance(target, NamedSharding) else contextlib.nullcontext():
        moved = jax.device_put(on_device, target.with_memory_kind(kind))
    return moved if moved.sharding == target else _respelled(moved, target)


def _with_devices(name: str, leaf: Any, target: Sharding) -> Sharding:
    """Returns the target on a mesh of devices: `jax.eval_shape` returns shardings whose mesh has none."""
    if not isinstance(target, NamedSharding) or isinstance(target.mesh, Mesh):
        return target
    axes = (target.mesh.axis_names, target.mesh.axis_sizes, target.mesh.axis_types)
    for mesh in (getattr(getattr(leaf, "sharding", None), "mesh", None), jax.sharding.get_mesh()):
        if isinstance(mesh, Mesh) and (mesh.axis_names, mesh.axis_sizes, mesh.axis_types) == axes:
            return NamedSharding(mesh, target.spec, memory_kind=target.memory_kind)
    raise ValueError(
        f"match_sharding: leaf {name}: expected a sharding on a mesh of devices, found {target}, and neither the leaf "
        "nor jax.set_mesh has a mesh like it. Call it within jax.set_mesh(mesh)."
    )


def same_placement(one: Sharding, other: Sharding, shape: specs.Shape) -> bool:
    """Returns whether two shardings give each device the same part of an array of this shape."""
    if one.device_set != other.device_set:
        return False
    if one.is_equivalent_to(other, len(shape)):
        return True
    ours, theirs = one.devices_indices_map(shape), other.devices_indices_map(shape)
    return all(specs.box(index, shape) == specs.box(theirs[device], shape) for device, index in ours.items())


def _respelled(leaf: jax.Array, target: Sharding) -> jax.Array:
    """Returns an array of the same buffers with another sharding; copies only to another memory of the same device."""
    if pieces.is_key(leaf):
        data = _respelled(jax.random.key_data(leaf), target)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    held = {shard.device: shard.data for shard in leaf.addressable_shards}
    arrays = [held[device] for device in target.addressable_devices_indices_map(leaf.shape)]
    if leaf.sharding.memory_kind != target.memory_kind:
        return pieces.assemble(leaf.shape, leaf.dtype, target, arrays, weak_type=leaf.weak_type)
    return join_arrays(leaf.shape, leaf.dtype, target, arrays, weak_type=leaf.weak_type)


def _match_traced(name: str, leaf: Any, target: Sharding) -> Any:
    if not isinstance(target, NamedSharding):
        return jax.device_put(leaf, target)
    try:
        explicit, auto = specs.split_by_axis_type(target)
    except ValueError as error:
        raise ValueError(f"match_sharding: leaf {name}: {error}") from None
    types, mesh = target.mesh.axis_types, target.mesh
    if AxisType.Explicit in types:
        leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, explicit))
    # The sharding of a traced array does not show auto axes: None there means unknown, unless the mesh has devices.
    if AxisType.Auto in types and (isinstance(mesh, Mesh) or any(specs.axes_of(entry) for entry in auto)):
        leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, auto))
    if isinstance(mesh, Mesh) and target.memory_kind not in (None, mesh.devices.flat[0].default_memory().kind):
        leaf = jax.device_put(leaf, target)
    return leaf
