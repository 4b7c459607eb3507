"""Cutting leaves that are too large to travel at once into slices, along the stored chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

from orbax_ext.plan.leaves import Leaf, Slice
from orbax_ext.plan.splitting import chunk_counts, split


def slices(leaf: Leaf, index: int, axes: Mapping[str, int], most: int) -> list[Leaf]:
    """Slices of a leaf of which as many as there are replicas to read them take `most` bytes of a device.

    None if the leaf is small enough, or if its chunks do not allow any: no stored byte may be read twice. The fewest
    slices that will do; where none do, the smallest.
    """
    if not leaf.divisible or leaf.chunk is None or leaf.block_bytes <= most:
        return []
    together = leaf.block_bytes * lanes_of(leaf, axes)
    best: tuple[tuple[bool, int, int], int, int] | None = None
    for dim, count in _ways(leaf):
        one = leaf.cut(Slice(index, dim, 0, leaf.block[dim] // count))
        lanes = lanes_of(one, axes)
        if count % lanes:  # the last ones would have nobody to travel with
            continue
        size = one.block_bytes * lanes
        rank = (size > most, count if size <= most else size, dim)
        if size < together and (best is None or rank < best[0]):
            best = (rank, dim, count)
    if best is None:
        return []
    _, dim, count = best
    size = leaf.block[dim] // count
    return [leaf.cut(Slice(index, dim, number * size, size)) for number in range(count)]


def _ways(leaf: Leaf) -> Iterator[tuple[int, int]]:
    """(dimension, number of equal slices that end where chunks end)."""
    for dim, count in enumerate(chunk_counts(leaf.block, leaf.chunk)):
        yield from ((dim, divisor) for divisor in _divisors(count) if divisor > 1)


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def lanes_of(leaf: Leaf, axes: Mapping[str, int]) -> int:
    """How many such leaves travel together, so that every replica has something to read."""
    assigned = split(leaf.block, leaf.chunk, axes)
    return math.prod(size for axis, size in axes.items() if axis not in assigned)
