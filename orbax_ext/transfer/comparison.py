"""Do the replicas hold the same, and what was stored? Worked out from digests, the same on every process. Pure.

Leaves are compared in bundles: leaves that lie on the devices in the same way, so that a device that holds part k of
one of them holds part k of all. A bundle's digest on a device is the fold of its leaves' digests there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.storage.checkpoint import digests

MOST = 16  # bundles that one meeting compares, so that messages stay short

Bundle = tuple[int, ...]  # indices of leaves
Folds = Mapping[str, Sequence[str]]  # "bundle/part": the different digests that a process has of it


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A part of a bundle that is not the same everywhere, or a bundle that is not as stored."""

    bundle: int
    part: int | None  # None: the replicas agree, but not with what is stored
    processes: tuple[int, ...]  # that have it wrong
    found: str
    expected: str
    reference: int | None = None  # a process that has it right


def bundles(leaves: Sequence[Leaf], chosen: Sequence[int], stored: frozenset[int]) -> list[Bundle]:
    """The leaves that lie alike, apart by whether their digests are stored."""
    alike: dict[object, list[int]] = {}
    for index in chosen:
        leaf = leaves[index]
        alike.setdefault((leaf.mesh, _grid_axes(leaf), index in stored), []).append(index)
    return [tuple(indices) for indices in alike.values()]


def split(bundle: Bundle) -> list[Bundle]:
    """A bundle as at most `MOST` smaller ones."""
    size = math.ceil(len(bundle) / MOST)
    return [bundle[start : start + size] for start in range(0, len(bundle), size)]


def first_mismatch(brought: Mapping[int, Folds], stored: Mapping[int, str]) -> Mismatch | None:
    """What is wrong first, if anything is. `stored` has the digests of bundles that can be compared with storage."""
    votes: dict[tuple[int, int], dict[str, list[int]]] = {}
    for process, folds in sorted(brought.items()):
        for key, found in folds.items():
            bundle, part = (int(number) for number in key.split("/"))
            for digest in found:
                votes.setdefault((bundle, part), {}).setdefault(digest, []).append(process)
    usual = {place: max(cast, key=lambda digest: len(cast[digest])) for place, cast in votes.items()}
    for (bundle, part), cast in sorted(votes.items()):
        expected = usual[bundle, part]
        for digest, processes in cast.items():
            if digest != expected:
                return Mismatch(bundle, part, tuple(processes), digest, expected, cast[expected][0])
    for bundle, expected in sorted(stored.items()):
        parts = {part: digest for (number, part), digest in usual.items() if number == bundle}
        total = digests.to_text(digests.add(map(digests.from_text, parts.values())))
        if total != expected:
            holders = {p for p, folds in brought.items() if any(key.startswith(f"{bundle}/") for key in folds)}
            return Mismatch(bundle, None, tuple(sorted(holders)), total, expected)
    return None


def part_number(starts: Sequence[int], block: Sequence[int], shape: Sequence[int]) -> int:
    """Which part of a leaf begins there, counted in row-major order of its grid of parts."""
    number = 0
    for start, size, whole in zip(starts, block, shape, strict=True):
        number = number * (whole // max(size, 1) or 1) + start // max(size, 1)
    return number


def box_text(leaf: Leaf, meshes: Sequence[MeshInfo], part: int | None) -> str:
    """The box of a part, such as `[0:8, :]`."""
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
    """The spec without what makes no difference: dimensions at the end that are not sharded."""
    return tuple(reversed(list(itertools.dropwhile(lambda axes: not axes, reversed(leaf.spec)))))
