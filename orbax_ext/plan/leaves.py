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
    shard_bytes: int  # of one device's share, as it will lie in memory
    mesh: int | None = None  # index of its mesh in the plan, None where it has none that can be planned for
    spec: tuple[tuple[str, ...], ...] = ()  # for each dimension, the mesh axes that it is sharded over
    direct_because: str = ""  # why it must be read the ordinary way; empty if it need not

    @property
    def used_axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.spec for axis in axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)
