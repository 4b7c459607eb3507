"""One array to restore, as plain data."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

# Types that numpy knows by name only after `ml_dtypes` was imported. Those of less than 16 bits take a byte in memory.
_EXTENSION_DTYPE = re.compile(r"bfloat(16)|b?complex(32)|u?int[124]|float[468]_e\d+m\d+\w*")


@dataclasses.dataclass(frozen=True)
class Slice:
    """Some rows of a leaf: `size` rows of one dimension of every device's block, from row `start`."""

    leaf: int  # index of the leaf in the request
    dim: int
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array as it is asked for, and what is known about how it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int = 1  # bytes of an element in memory
    block: tuple[int, ...] = ()  # shape of the part that one device holds
    mesh: int | None = None  # index of its mesh in the plan, None where there is none to plan for
    spec: tuple[tuple[str, ...], ...] = ()  # for each dimension, the mesh axes that it is sharded over
    chunk: tuple[int, ...] | None = None  # shape of a stored chunk, None where that is not known
    divisible: bool = False  # whether a slice of it can be read
    slice: Slice | None = None  # if this is a slice of another leaf: which rows
    direct_because: str = ""  # why it must be read directly, as plain Orbax does; empty if it can travel

    @property
    def used_axes(self) -> frozenset[str]:
        return _axes_in(self.spec)

    @functools.cached_property  # used many times for each of thousands of leaves
    def block_bytes(self) -> int:
        return math.prod(self.block) * self.itemsize

    def named(self, name: str) -> Leaf:
        """Returns the same leaf with another name. `dataclasses.replace` takes much longer, for thousands of leaves."""
        leaf = object.__new__(Leaf)
        vars(leaf).update(vars(self), name=name)
        return leaf

    def shards(self, dim: int) -> int:
        """Returns into how many blocks a dimension is cut."""
        return self.shape[dim] // self.block[dim] if self.block[dim] else 1

    def sliced(self, rows: Slice) -> Leaf:
        """Returns a slice as a leaf of its own: the same rows of every device's block, one after the other."""
        shape, block = list(self.shape), list(self.block)
        shape[rows.dim], block[rows.dim] = rows.size * self.shards(rows.dim), rows.size
        return dataclasses.replace(self, shape=tuple(shape), block=tuple(block), slice=rows)


@functools.lru_cache(maxsize=256)
def _axes_in(spec: tuple[tuple[str, ...], ...]) -> frozenset[str]:
    return frozenset(axis for axes in spec for axis in axes)


def itemsize(dtype: str) -> int:
    """Returns the bytes that an element takes in memory. Raises `ValueError` if there is no such dtype."""
    if extension := _EXTENSION_DTYPE.fullmatch(dtype):
        return int(extension[extension.lastindex]) // 8 if extension.lastindex else 1
    try:
        return int(np.dtype(dtype).itemsize)
    except TypeError:
        raise ValueError(f"{dtype!r} is not a dtype such as bfloat16, float32, int8") from None
