"""How many bytes a plan reads, step by step, in all processes together. Pure.

These are bytes in memory: what is read from storage is less where it is compressed, more where chunks are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from orbax_ext.plan import Leaf, MeshInfo, RestorePlan

Steps = dict[int | None, int]

_ITEMSIZE = 4  # of a dtype that is not known


def steps(plan: RestorePlan, meshes: Sequence[MeshInfo], processes: int) -> Steps:
    """Bytes to read for each group, and under None for the leaves that every process reads for itself."""
    found: Steps = {}
    for number, group in enumerate(plan.groups):
        found[number] = sum(_bytes(plan.items[leaf]) for leaf in group.leaves)
    found[None] = sum(
        leaf.block_bytes * _readers(meshes[leaf.mesh], leaf) if leaf.mesh is not None else _bytes(leaf) * processes
        for leaf in map(plan.items.__getitem__, plan.direct)
    )
    return found


def _bytes(leaf: Leaf) -> int:
    if leaf.mesh is not None:
        return math.prod(leaf.shape) * leaf.itemsize
    try:
        itemsize = np.dtype(leaf.dtype).itemsize
    except TypeError:
        itemsize = _ITEMSIZE
    return math.prod(leaf.shape) * itemsize


def _readers(mesh: MeshInfo, leaf: Leaf) -> int:
    """How many blocks of a leaf are read if every process reads those that it holds, each once."""
    owners = np.array(mesh.processes).reshape(mesh.axis_sizes)
    used = [at for at, name in enumerate(mesh.axis_names) if name in leaf.used_axes]
    copies = [at for at in range(len(mesh.axis_names)) if at not in used]
    table = np.sort(owners.transpose([*copies, *used]).reshape(math.prod(mesh.axis_sizes[at] for at in copies), -1), 0)
    return int(table.shape[1] + np.count_nonzero(np.diff(table, axis=0)))
