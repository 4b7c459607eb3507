"""Puts blocks together as exchanges do, to see what was read. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from orbax_ext.plan import Bundle, Group, LaneBatch, Leaf, MeshInfo
from orbax_ext.plan.cutting import piece_shape


class Arriving:
    """The blocks of all leaves, as the exchanges fill them: 0 where nothing was read, 1 where it was."""

    def __init__(self, mesh: MeshInfo) -> None:
        self.blocks: dict[int, np.ndarray] = {}
        self.read: Counter[tuple[tuple[str, ...], int]] = Counter()  # bytes by (replica axes, replica)
        self._mesh = mesh

    def exchange(self, group: Group, leaves: Sequence[Leaf]) -> None:
        sizes = {axis: self._mesh.sizes[axis] for axis in group.axes}
        for bundle in group.bundles:
            for index, block in _travels(bundle, leaves, sizes):
                if index in group.dropped:
                    continue
                self._place(leaves, index, block)
            for replica, size in enumerate(
                bundle.read_bytes([leaf.block_bytes for leaf in leaves], math.prod(sizes.values()))
            ):
                self.read[group.axes, replica] += int(size)

    def read_directly(self, group: Group, leaves: Sequence[Leaf]) -> None:
        for index in group.leaves:
            self._place(leaves, index, np.ones(leaves[index].block))

    def _place(self, leaves: Sequence[Leaf], index: int, block: np.ndarray) -> None:
        rows = leaves[index].slice
        if rows is None:
            assert index not in self.blocks, f"{leaves[index]} arrives twice"
            self.blocks[index] = block
            return
        whole = self.blocks.setdefault(rows.leaf, np.zeros(leaves[rows.leaf].block))
        where = tuple(
            slice(rows.start, rows.start + rows.size) if dim == rows.dim else slice(None) for dim in range(whole.ndim)
        )
        assert whole[where].shape == block.shape
        assert not (whole[where] * block).any(), f"{leaves[index]} arrives twice"
        whole[where] = block


def _travels(bundle: Bundle, leaves: Sequence[Leaf], sizes: dict[str, int]):  # type: ignore[no-untyped-def]
    """Yields what arrives: the block of each leaf, with holes where replicas were absent."""
    if not isinstance(bundle, LaneBatch):
        yield from ((leaf, np.ones(leaves[leaf].block)) for leaf in bundle.leaves)
        return
    # As the all-gather puts pieces together: a table with an axis for each replica axis and each dimension.
    shape, dims = leaves[bundle.leaves[0]].block, dict(bundle.splits)
    piece = piece_shape(shape, dims, sizes)
    pieces = np.ones((math.prod(sizes.values()), *piece))
    pieces[list(bundle.absent)] = 0
    axes = list(sizes)
    order = [at for at, axis in enumerate(axes) if axis not in dims]
    for dim in range(len(piece)):
        order += [at for at, axis in enumerate(axes) if dims.get(axis) == dim] + [len(axes) + dim]
    table = pieces.reshape(*sizes.values(), *piece).transpose(order).reshape(len(bundle.leaves), *shape)
    yield from zip(bundle.leaves, table, strict=True)
