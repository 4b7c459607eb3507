"""One array to restore, as plain data."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a leaf: of each device's block, `size` rows of a dimension, from `start` on."""

    leaf: int  # which leaf of the restore
    dim: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is asked for, and what is known of how it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int = 1  # bytes of an element in memory
    block: tuple[int, ...] = ()  # shape of one device's share
    mesh: int | None = None  # index of its mesh in the plan, None where it has none that can be planned for
    spec: tuple[tuple[str, ...], ...] = ()  # for each dimension, the mesh axes that it is sharded over
    chunk: tuple[int, ...] | None = None  # shape of a stored chunk, None where that is not known
    divisible: bool = False  # whether a slice of it can be read
    slice: Slice | None = None  # of which leaf this is a slice
    direct_because: str = ""  # why it must be read the ordinary way; empty if it need not

    @property
    def used_axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.spec for axis in axes)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block) * self.itemsize

    def shards(self, dim: int) -> int:
        """Into how many blocks a dimension is cut."""
        return self.shape[dim] // self.block[dim] if self.block[dim] else 1

    def cut(self, part: Slice) -> Leaf:
        """The part of this leaf, as a leaf of its own: the same rows of every device's block, one after the other."""

        def changed(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
            return (*sizes[: part.dim], size, *sizes[part.dim + 1 :])

        return dataclasses.replace(
            self,
            shape=changed(self.shape, part.size * self.shards(part.dim)),
            block=changed(self.block, part.size),
            slice=part,
        )
