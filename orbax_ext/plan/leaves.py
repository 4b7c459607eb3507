"""One array to restore, as plain data."""

from __future__ import annotations

import dataclasses
import math


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
    direct_because: str = ""  # why it must be read the ordinary way; empty if it need not

    @property
    def used_axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.spec for axis in axes)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block) * self.itemsize
