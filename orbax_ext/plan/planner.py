"""From leaves, meshes and options to a `RestorePlan`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from orbax_ext.options import Options
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo, infer_axes, resolve_axes


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that travel together, in one program."""

    mesh: int
    axes: tuple[str, ...]  # the replica axes
    leaves: tuple[int, ...]  # indices
    device_bytes: int  # what the leaves take on one device


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """Who reads what and how it travels."""

    groups: tuple[Group, ...]
    direct: Mapping[int, str]  # leaf index: why it is read the ordinary way


def make_plan(
    leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], options: Options, *, processes: int, budget: int
) -> RestorePlan:
    """Decides for every leaf whether it is broadcast, and puts those that are into groups of at most `budget` bytes.

    A single leaf above the budget makes a group of its own.
    """
    axes_of_mesh = {index: _axes(index, mesh, leaves, options) for index, mesh in enumerate(meshes)}
    direct: dict[int, str] = {}
    together: dict[int, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        reason = leaf.direct_because or _why_direct(leaf, meshes, axes_of_mesh, options, processes)
        if reason or leaf.mesh is None:
            direct[index] = reason
        else:
            together[leaf.mesh].append(index)
    groups = []
    for mesh, indices in together.items():
        for batch in _batches(indices, leaves, budget):
            size = sum(leaves[index].shard_bytes for index in batch)
            groups.append(Group(mesh, axes_of_mesh[mesh], tuple(batch), size))
    return RestorePlan(tuple(groups), direct)


def digest(value: object) -> str:
    """A short fingerprint of plain data, the same on every process for equal data."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _axes(index: int, mesh: MeshInfo, leaves: Sequence[Leaf], options: Options) -> tuple[str, ...]:
    if options.axes is not None:
        axes = resolve_axes(mesh, options.axes)
    else:
        used: set[str] = set().union(*(leaf.used_axes for leaf in leaves if leaf.mesh == index))
        axes = infer_axes(mesh, used)
    primary, replicas = options.primary_replica_id or 0, mesh.replicas(axes)
    if replicas > 1 and primary >= replicas:
        raise ValueError(
            f"primary_replica_id={primary} does not exist: the mesh {mesh} has {replicas} replicas along "
            f"{', '.join(map(repr, axes))}. Give a number from 0 to {replicas - 1}."
        )
    return axes


def _why_direct(
    leaf: Leaf,
    meshes: Sequence[MeshInfo],
    axes_of_mesh: Mapping[int, tuple[str, ...]],
    options: Options,
    processes: int,
) -> str:
    """Why a leaf is read the ordinary way, or an empty string."""
    if leaf.mesh is None:
        return "it has no mesh"
    mesh, axes = meshes[leaf.mesh], axes_of_mesh[leaf.mesh]
    if options.strategy == "direct":
        return "strategy is 'direct'"
    if options.strategy == "auto" and processes == 1:
        return "there is only one process"
    if set(mesh.processes) != set(range(processes)):
        return f"its mesh {mesh} does not span all processes"
    if mesh.replicas(axes) == 1:
        return f"there is only one replica of it in the mesh {mesh}"
    if leaf.used_axes & set(axes):
        return f"it is sharded on the replica axis {', '.join(map(repr, axes))}"
    return ""


def _batches(indices: Sequence[int], leaves: Sequence[Leaf], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room = 0
    for index in indices:
        size = leaves[index].shard_bytes
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= size
    return batches
