"""How many bytes a process reads for an exchange, and how many move from process to process, by the plan. Pure.

Counted is what a device gets from a device of another process, whichever way the collective takes it there: a ring
that passes data on from host to host moves the same bytes over each of its links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from orbax_ext.plan import Bundle, LaneBatch, Leaf, MeshInfo, Pack, RestorePlan, Sum

_WORD = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of one process: what its devices read and bring to an exchange, receive from other processes, send to them."""

    brought: int = 0
    received: int = 0
    sent: int = 0


def of_process(plan: RestorePlan, meshes: Sequence[MeshInfo], process: int) -> list[Traffic]:
    """The traffic of one process, in bytes, for each group of a plan."""
    found = []
    weights: dict[tuple[int, tuple[str, ...]], list[np.ndarray]] = {}
    for group in plan.groups:
        key = (group.mesh, group.axes)
        if key not in weights:
            weights[key] = _weights(meshes[group.mesh], group.axes, process)
        own, into, out_of = weights[key]
        read = sum(_read(bundle, plan.leaves, len(own)) for bundle in group.bundles)
        offered = sum(_offered(bundle, plan.leaves, len(own)) for bundle in group.bundles)
        found.append(Traffic(int(read @ own), int(offered @ into), int(offered @ out_of)))
    return found


def _weights(mesh: MeshInfo, axes: Sequence[str], process: int) -> list[np.ndarray]:
    """For each replica, how often a byte on each of its devices is the process's own, comes into it, and leaves it."""
    table = mesh.owners(axes)
    mine = table == process
    here = mine.sum(axis=0)  # devices of the process among the copies of each piece
    ways = (mine, ~mine * here, mine * (len(table) - here))
    return [way.sum(axis=1) for way in ways]


def _read(bundle: Bundle, items: Sequence[Leaf], replicas: int) -> np.ndarray:
    """Bytes that each replica reads for a bundle, on each of its devices."""
    if isinstance(bundle, Pack):
        return np.array([sum(items[leaf].block_bytes for leaf in share) for share in bundle.shares])
    return _offered(bundle, items, replicas)


def _offered(bundle: Bundle, items: Sequence[Leaf], replicas: int) -> np.ndarray:
    """Bytes that each replica brings to the exchange, on each of its devices; padding travels too."""
    if isinstance(bundle, Sum):
        offered = np.zeros(replicas, np.int64)
        offered[bundle.reader] = items[bundle.leaf].block_bytes
        return offered
    if isinstance(bundle, LaneBatch):
        return np.full(replicas, sum(items[leaf].block_bytes for leaf in bundle.leaves) // replicas)
    if bundle.summed:
        return np.array([sum(items[leaf].block_bytes for leaf in share) for share in bundle.shares], np.int64)
    return np.full(replicas, bundle.words * _WORD)
