"""Cutting a block among the replicas that hold it, along the stored chunks, so that no chunk is read twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def split(block: Sequence[int], chunk: Sequence[int] | None, axes: Mapping[str, int]) -> dict[str, int]:
    """Assigns replica axes (name: size) to the dimensions of a block; axes that fit nowhere are left out.

    A dimension can be cut by an axis if the pieces are equal and end where stored chunks end.
    """
    chunks = chunk_counts(block, chunk)
    assigned: dict[str, int] = {}
    for axis, size in sorted(axes.items(), key=lambda item: (-item[1], item[0])):
        fitting = [dim for dim, count in enumerate(chunks) if count % size == 0]
        if fitting:
            dim = max(fitting, key=lambda dim: (chunks[dim], -dim))
            chunks[dim] //= size
            assigned[axis] = dim
    return assigned


def chunk_counts(block: Sequence[int], chunk: Sequence[int] | None) -> list[int]:
    """For each dimension of a block, how many stored chunks it holds; 1 where they do not fit or are not known."""
    if chunk is None or len(chunk) != len(block):
        return [1] * len(block)
    # Chunks that do not fit into the block are read in part anyway: cutting there would only add to that.
    return [size // stored if stored and size % stored == 0 else 1 for size, stored in zip(block, chunk, strict=True)]


def part_shape(block: Sequence[int], assigned: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one replica's piece of a block."""
    part = list(block)
    for axis, dim in assigned.items():
        part[dim] //= axes[axis]
    return tuple(part)
