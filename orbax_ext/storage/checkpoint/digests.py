"""Digests of arrays that do not depend on how the arrays are cut into shards. Pure: numpy alone.

A leaf's digest is the sum, modulo 2**64, of a hash of each element's bits and its place in the leaf. So the digests of
the shards of a leaf add up to the leaf's own, and several leaves can be folded into one number that still adds up.
Digests detect accidents, not forgeries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

_CHUNK = 1 << 16  # elements at a time, so that they stay in the processor's cache
_MASK = (1 << 64) - 1
_PLACE, _BITS, _FIRST, _SECOND = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF, _SHIFT = np.uint64(32), np.uint64(29)


def of_block(block: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the digest of a box of a leaf of the given shape; the first element of the box is at `starts`."""
    words = _words(block)
    dims = _merged(block.shape, starts, shape)
    total = 0
    for begin in range(0, words.shape[0], _CHUNK):
        part = words[begin : begin + _CHUNK]
        places = _places(begin, begin + len(part), dims)
        for word in range(part.shape[1]):  # two for complex128
            total += _sum_of_hashes(part[:, word], places * np.uint64(part.shape[1]) + np.uint64(word))
    return total & _MASK


def add(digests: Iterable[int]) -> int:
    """Returns the digest of a leaf from those of its parts."""
    return sum(digests) & _MASK


def fold(digests: Iterable[tuple[str, int]]) -> int:
    """Returns one number for the names and digests of several leaves. Folds of parts add up to the fold of wholes."""
    return sum(_coefficient(name) * digest for name, digest in digests) & _MASK


def to_text(digest: int) -> str:
    return f"{digest:016x}"


def from_text(text: str) -> int:
    return int(text, 16) & _MASK


def _sum_of_hashes(bits: np.ndarray, places: np.ndarray) -> int:
    hashed = bits.astype(np.uint64)
    hashed *= _BITS
    hashed ^= places * _PLACE
    hashed ^= hashed >> _HALF
    hashed *= _FIRST
    hashed ^= hashed >> _SHIFT
    hashed *= _SECOND
    hashed ^= hashed >> _HALF
    return int(hashed.sum(dtype=np.uint64))


def _words(block: np.ndarray) -> np.ndarray:
    """Returns the bits of each element, as a row of unsigned integers."""
    flat = np.ascontiguousarray(block).reshape(-1)
    size = flat.dtype.itemsize
    words = flat.view(f"u{min(size, 8)}").reshape(flat.size, max(1, size // 8))
    if flat.dtype.name.startswith(("int4", "uint4", "float4")):
        return words & np.uint8(0x0F)  # the other bits may hold anything
    return words & np.uint8(0x03) if flat.dtype.name.startswith(("int2", "uint2")) else words


def _merged(sizes: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (size, start, whole) of each dimension, last first; one that follows a whole one is merged with it."""
    dims: list[tuple[int, int, int]] = []
    for size, start, whole in zip(reversed(sizes), reversed(starts), reversed(shape), strict=True):
        if dims and dims[-1][0] == dims[-1][2]:
            inner = dims.pop()[2]
            size, start, whole = size * inner, start * inner, whole * inner
        dims.append((size, start, whole))
    return dims


def _places(begin: int, end: int, dims: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Returns the row-major places in the whole leaf of the elements `begin` to `end` of a block."""
    rest = np.arange(begin, end, dtype=np.uint64)
    if len(dims) <= 1:
        return rest + np.uint64(dims[0][1] if dims else 0)
    places, stride = np.zeros_like(rest), 1
    for size, start, whole in dims:
        places += (rest % np.uint64(size) + np.uint64(start)) * np.uint64(stride)
        rest //= np.uint64(size)
        stride *= whole
    return places


def _coefficient(name: str) -> int:
    """Returns an odd number for a leaf's name, so that leaves that change places change the fold."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") | 1
