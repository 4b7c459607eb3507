"""How many bytes an exchange moves from process to process, by the plan. Pure.

Counted is what a device gets from a device of another process, whichever way the collective takes it there: a ring
that passes data on from host to host moves the same bytes over each of its links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from orbax_ext.plan import Bundle, Leaf, MeshInfo, RestorePlan, Stack, Sum

_WORD = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What the devices of a process receive from other processes, and what those get from it, in bytes."""

    received: int = 0
    sent: int = 0


def of_process(plan: RestorePlan, leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], process: int) -> Traffic:
    received = sent = 0
    weights: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, np.ndarray]] = {}
    for group in plan.groups:
        key = (group.mesh, group.axes)
        if key not in weights:
            weights[key] = _weights(meshes[group.mesh], group.axes, process)
        into, out_of = weights[key]
        for bundle in group.bundles:
            offered = _offered(bundle, leaves, len(into))
            received += int(offered @ into)
            sent += int(offered @ out_of)
    return Traffic(received, sent)


def _weights(mesh: MeshInfo, axes: Sequence[str], process: int) -> tuple[np.ndarray, np.ndarray]:
    """For each replica, how often a byte on each of its devices comes into the process, and leaves it."""
    owners = np.array(mesh.processes).reshape(mesh.axis_sizes)
    replica_axes = [mesh.axis_names.index(axis) for axis in axes]
    rest = [at for at in range(len(mesh.axis_names)) if at not in replica_axes]
    table = owners.transpose([*replica_axes, *rest]).reshape(mesh.replicas(axes), -1)
    mine = table == process
    here = mine.sum(axis=0)  # devices of the process among the copies of each piece
    return (~mine * here).sum(axis=1), (mine * (len(table) - here)).sum(axis=1)


def _offered(bundle: Bundle, leaves: Sequence[Leaf], replicas: int) -> np.ndarray:
    """Bytes that each replica brings to the exchange, on each of its devices."""
    if isinstance(bundle, Sum):
        offered = np.zeros(replicas, np.int64)
        offered[bundle.reader] = leaves[bundle.leaf].block_bytes
        return offered
    if isinstance(bundle, Stack):
        return np.full(replicas, sum(leaves[leaf].block_bytes for leaf in bundle.leaves) // replicas)
    return np.full(replicas, bundle.words * _WORD)
