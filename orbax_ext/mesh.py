"""Meshes of one replica, and the scope that makes a mesh the current one, whatever the caller has set.

JAX's context mesh decides which devices an eager or jitted step may use, so every such step of a restore runs in the
`scope` of its own mesh (https://github.com/google/orbax/issues/3184).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_ext.plan import MeshInfo


def describe(mesh: Mesh) -> MeshInfo:
    """Returns the mesh as plain data."""
    processes = tuple(device.process_index for device in mesh.devices.flat)
    return MeshInfo(tuple(mesh.axis_names), tuple(mesh.devices.shape), processes)


def scope(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Makes `mesh` the current mesh of this thread. Leave it before an `await`."""
    context: contextlib.AbstractContextManager[Any] = jax.set_mesh(mesh)
    return context


def by_replica(mesh: Mesh, axes: Sequence[str]) -> np.ndarray:
    """Returns the mesh's devices as a table with one row per replica along `axes`."""
    positions = [mesh.axis_names.index(axis) for axis in axes]
    replicas_first = np.moveaxis(mesh.devices, positions, range(len(positions)))
    replicas = int(np.prod([mesh.devices.shape[position] for position in positions]))
    return replicas_first.reshape(replicas, -1)


def replica_mesh(mesh: Mesh, axes: Sequence[str], replica: int) -> Mesh:
    """Returns the part of a mesh that one replica occupies: the same axes and axis types, of size 1 along `axes`."""
    sizes = [mesh.devices.shape[mesh.axis_names.index(axis)] for axis in axes]
    position = dict(zip(axes, np.unravel_index(replica, sizes), strict=True))
    index = tuple(
        slice(position[name], position[name] + 1) if name in position else slice(None) for name in mesh.axis_names
    )
    return Mesh(mesh.devices[index], mesh.axis_names, axis_types=mesh.axis_types)


def replica_sharding(sharding: NamedSharding, mesh: Mesh) -> NamedSharding:
    """Returns the same spec on one replica's mesh, in the devices' own memory.

    Unconstrained dimensions become unsharded: Orbax reads them so, and programs can't return unconstrained arrays.
    """
    spec = [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in sharding.spec]
    return NamedSharding(mesh, PartitionSpec(*spec))


def split_sharding(sharding: NamedSharding, mesh: Mesh, splits: Sequence[tuple[str, int]]) -> NamedSharding:
    """Returns a replica's sharding with dimensions sharded further, by pairs (axis, dimension)."""
    ndim = max([len(sharding.spec), *(dim + 1 for _, dim in splits)])
    entries = [list(axes) for axes in normalized_spec(sharding.spec, ndim)]
    for axis, dim in splits:
        entries[dim].append(axis)
    return NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in entries)))


def normalized_spec(spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Returns for each dimension the mesh axes that it is sharded over."""
    entries = [*spec, *([None] * (ndim - len(spec)))]
    return tuple(_axes_of(entry) for entry in entries)


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
