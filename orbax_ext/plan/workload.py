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
        found[number] = sum(_bytes(plan.leaves[leaf]) for leaf in group.leaves)
    found[None] = sum(
        leaf.block_bytes * _readers(meshes[leaf.mesh], leaf) if leaf.mesh is not None else _bytes(leaf) * processes
        for leaf in map(plan.leaves.__getitem__, plan.direct)
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
    copies = [axis for axis in mesh.axis_names if axis not in leaf.used_axes]
    table = np.sort(mesh.owners(copies), axis=0)
    return int(table.shape[1] + np.count_nonzero(np.diff(table, axis=0)))
