"""Compares digests of restored leaves across replicas and with stored digests, the same on every process. Pure.

Leaves are compared in sets of leaves that are laid out in the same way, so that a device that holds part k of one of
them holds part k of all. The digest of a set on a device is the fold of its leaves' digests there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.storage.checkpoint import digests

MOST = 16  # sets that one meeting compares, so that messages stay short

LeafSet = tuple[int, ...]  # indices of leaves that are compared together
Folds = Mapping[str, Sequence[str]]  # "set/part": the different digests that a process has of it


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A part of a set that differs between processes, or a set that differs from what is stored."""

    leaf_set: int
    part: int | None  # None if the replicas agree, but differ from what is stored
    processes: tuple[int, ...]  # that have it wrong
    found: str
    expected: str
    reference: int | None = None  # a process that has it right


def leaf_sets(leaves: Sequence[Leaf], chosen: Sequence[int], stored: frozenset[int]) -> list[LeafSet]:
    """Returns sets of leaves that are laid out in the same way, apart by whether their digests are stored."""
    by_layout: dict[object, list[int]] = {}
    for index in chosen:
        leaf = leaves[index]
        by_layout.setdefault((leaf.mesh, _grid_axes(leaf), index in stored), []).append(index)
    return [tuple(indices) for indices in by_layout.values()]


def split(leaf_set: LeafSet) -> list[LeafSet]:
    """Cuts a set into at most `MOST` smaller ones."""
    size = math.ceil(len(leaf_set) / MOST)
    return [leaf_set[start : start + size] for start in range(0, len(leaf_set), size)]


def first_mismatch(brought: Mapping[int, Folds], stored: Mapping[int, str]) -> Mismatch | None:
    """Returns the first mismatch, if there is one.

    `brought` has what each process found, `stored` the digests of the sets that can be compared with storage.
    """
    votes: dict[tuple[int, int], dict[str, list[int]]] = {}
    for process, folds in sorted(brought.items()):
        for key, found in folds.items():
            leaf_set, part = (int(number) for number in key.split("/"))
            for digest in found:
                votes.setdefault((leaf_set, part), {}).setdefault(digest, []).append(process)
    usual = {place: max(cast, key=lambda digest: len(cast[digest])) for place, cast in votes.items()}
    for (leaf_set, part), cast in sorted(votes.items()):
        expected = usual[leaf_set, part]
        for digest, processes in cast.items():
            if digest != expected:
                return Mismatch(leaf_set, part, tuple(processes), digest, expected, cast[expected][0])
    for leaf_set, expected in sorted(stored.items()):
        parts = {part: digest for (number, part), digest in usual.items() if number == leaf_set}
        total = digests.to_text(digests.add(map(digests.from_text, parts.values())))
        if total != expected:
            holders = {p for p, folds in brought.items() if any(key.startswith(f"{leaf_set}/") for key in folds)}
            return Mismatch(leaf_set, None, tuple(sorted(holders)), total, expected)
    return None


def part_number(starts: Sequence[int], block: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the number of the part of a leaf that begins at `starts`, in row-major order of its grid of parts."""
    number = 0
    for start, size, whole in zip(starts, block, shape, strict=True):
        number = number * (whole // max(size, 1) or 1) + start // max(size, 1)
    return number


def box_text(leaf: Leaf, meshes: Sequence[MeshInfo], part: int | None) -> str:
    """Returns the box of a part, such as `[0:8, :]`."""
    if leaf.mesh is None or part is None:
        return "[" + ", ".join(":" for _ in leaf.shape) + "]"
    sizes = meshes[leaf.mesh].sizes
    counts = [math.prod(sizes[axis] for axis in axes) for axes in leaf.spec]
    texts: list[str] = []
    for count, whole in zip(reversed(counts), reversed(leaf.shape), strict=True):
        part, place = divmod(part, count)
        block = whole // count
        texts.insert(0, ":" if count == 1 else f"{place * block}:{(place + 1) * block}")
    return f"[{', '.join(texts)}]"


def _grid_axes(leaf: Leaf) -> tuple[tuple[str, ...], ...]:
    """Returns the spec without dimensions at the end that are not sharded: they make no difference."""
    return tuple(reversed(list(itertools.dropwhile(lambda axes: not axes, reversed(leaf.spec)))))
