"""Cuts along the stored chunks: large leaves into slices, and blocks among the replicas that hold them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from orbax_ext.plan.leaves import Leaf, Slice


def slices(leaf: Leaf, index: int, axes: Mapping[str, int], most: int) -> list[Leaf]:
    """Cuts a leaf so that one slice per reading replica fits into `most` bytes of a device.

    Returns the fewest slices that fit; where none fit, the smallest. Returns none if the leaf is small enough, or if
    its chunks do not allow a cut: no stored byte may be read twice.
    """
    if not leaf.divisible or leaf.chunk is None or leaf.block_bytes <= most:
        return []
    uncut = leaf.block_bytes * lane_count(leaf, axes)
    cuts = []
    for dim, chunks in enumerate(_chunk_counts(leaf.block, leaf.chunk)):
        for count in _divisors(chunks)[1:]:
            first = leaf.sliced(Slice(index, dim, 0, leaf.block[dim] // count))
            lanes = lane_count(first, axes)
            size = first.block_bytes * lanes
            if size < uncut and count % lanes == 0:  # so that the last slices fill a batch of lanes
                cuts.append((size > most, count if size <= most else size, dim, count))
    if not cuts:
        return []
    *_, dim, count = min(cuts)
    size = leaf.block[dim] // count
    return [leaf.sliced(Slice(index, dim, number * size, size)) for number in range(count)]


def lane_count(leaf: Leaf, axes: Mapping[str, int]) -> int:
    """Returns how many leaves like this one travel together, so that every replica has something to read."""
    assigned = split(leaf.block, leaf.chunk, axes)
    return math.prod(size for axis, size in axes.items() if axis not in assigned)


def split(block: Sequence[int], chunk: Sequence[int] | None, axes: Mapping[str, int]) -> dict[str, int]:
    """Assigns replica axes (name: size) to the dimensions of a block; axes that fit nowhere are left out.

    An axis can cut a dimension if the pieces are equal and end where stored chunks end, so that no chunk is read twice.
    """
    counts = _chunk_counts(block, chunk)
    assigned: dict[str, int] = {}
    for axis, size in sorted(axes.items(), key=lambda axis: (-axis[1], axis[0])):
        fitting = [dim for dim, count in enumerate(counts) if count % size == 0]
        if fitting:
            dim = max(fitting, key=lambda dim: (counts[dim], -dim))
            counts[dim] //= size
            assigned[axis] = dim
    return assigned


def piece_shape(block: Sequence[int], assigned: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one replica's piece of a block."""
    piece = list(block)
    for axis, dim in assigned.items():
        piece[dim] //= axes[axis]
    return tuple(piece)


def _chunk_counts(block: Sequence[int], chunk: Sequence[int] | None) -> list[int]:
    """Returns how many stored chunks each dimension of a block holds; 1 where they do not fit or are not known."""
    if chunk is None or len(chunk) != len(block):
        return [1] * len(block)
    # Chunks that do not fit into the block are read in part anyway: a cut there would only add to that.
    return [size // stored if stored and size % stored == 0 else 1 for size, stored in zip(block, chunk, strict=True)]


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
