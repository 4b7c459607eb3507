"""Digests of arrays that do not depend on how the arrays are cut into shards. Pure: numpy alone.

The digests of the shards of a leaf add up, modulo 2**64, to the leaf's own, and several leaves can be folded into one
number that still adds up. Digests detect accidents, not forgeries.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from orbax_ext.storage.checkpoint import hashes

CURRENT = 2  # the version of digests that are made
_HASHES = {1: hashes.of_elements, 2: hashes.of_words}  # all versions that can be compared with


def of_block(block: np.ndarray, starts: Sequence[int], shape: Sequence[int], version: int = CURRENT) -> int:
    """Returns the digest of a box of a leaf of the given shape; the first element of the box is at `starts`."""
    return _HASHES[version](block, starts, shape)


def add(digests: Iterable[int]) -> int:
    """Returns the digest of a leaf from those of its parts."""
    return sum(digests) & hashes.MASK


def fold(digests: Iterable[tuple[str, int]]) -> int:
    """Returns one number for the names and digests of several leaves. Folds of parts add up to the fold of wholes."""
    return sum(_coefficient(name) * digest for name, digest in digests) & hashes.MASK


def to_text(digest: int) -> str:
    return f"{digest:016x}"


def from_text(text: str) -> int:
    return int(text, 16) & hashes.MASK


@functools.lru_cache(maxsize=1 << 16)
def _coefficient(name: str) -> int:
    """Returns an odd number for a leaf's name, so that leaves that change places change the fold."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") | 1
