"""How a box of an array becomes one number: a version of the digest each. Pure: numpy alone.

Every version is a sum, modulo 2**64, of a number for each part of the array that depends on its bits and its place. So
the hashes of the boxes of an array add up to the hash of the array, however it is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

MASK = (1 << 64) - 1

_WORD = 8  # bytes
_WORDS = 1 << 16  # words at a time, so that they are still in the processor's cache when they are read again
_SLAB = 1 << 22  # bytes that are handled at a time, so that temporary arrays stay small
_FEW = 1 << 14  # keys that are kept for the next box
_TABLE = 1 << 12  # keys that are computed; all others are products of two of them
_FOLD = 0x8EBC6AF09C88C6E3  # odd
_HALF = np.uint64(32)

_CHUNK = 1 << 16  # elements at a time
_PLACE, _BITS, _FIRST, _SECOND = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_SHIFT = np.uint64(29)


# Version 2: words of 64 bits along the last dimension, times a key for each coordinate. At the speed of memory.


def of_words(block: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the hash of a box: the sum of its words, each times the product of a key for each coordinate.

    A word is eight bytes of a row of the whole array, filled up with zeros at the row's end. Its value is
    `word + _FOLD * (word >> 32)`: the product of a word's highest bit and an odd key is 2**63 whatever the key, so two
    changed signs would cancel out.
    """
    del shape  # the place of a row's first word does not depend on it
    if block.ndim == 0:
        block, starts = block.reshape(1), (0,)
    if block.size == 0:
        return 0
    rest = math.prod(block.shape[1:])
    rows = max(1, _SLAB // (rest * max(_WORD if block.ndim > 1 else 0, block.dtype.itemsize)))
    slabs = range(0, block.shape[0], rows)
    return sum(_of_slab(block[first : first + rows], (starts[0] + first, *starts[1:])) for first in slabs) & MASK


def _of_slab(block: np.ndarray, starts: Sequence[int]) -> int:
    words, first = _rows_of_words(block, starts[-1])
    totals = np.zeros(len(words), np.uint64)
    for column in range(0, words.shape[1], _WORDS):
        width = min(_WORDS, words.shape[1] - column)
        keys = _keys(0, first + column, width)
        height = _WORDS // width
        for row in range(0, len(words), height):
            part = words[row : row + height, column : column + width]
            totals[row : row + height] += _products(part, keys) + _products(_halves(part), keys) * np.uint64(_FOLD)
    for dim, (size, start) in enumerate(zip(reversed(block.shape[:-1]), reversed(starts[:-1]), strict=True), 1):
        totals = _products(totals.reshape(-1, size), _keys(dim, start, size))
    return int(totals[0])


def _products(rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the product of each row and the keys. `einsum` is vectorised for integers, `dot` is not."""
    products: np.ndarray = np.einsum("ij,j->i", rows, keys)
    return products


def _halves(words: np.ndarray) -> np.ndarray:
    """Returns a view of the upper half of each word: `einsum` makes words of them as it reads them."""
    return words.view(np.uint32)[:, 1::2]


def _rows_of_words(block: np.ndarray, start: int) -> tuple[np.ndarray, int]:
    """Returns the words of each row of the last dimension, and the number of their first word in the whole row."""
    masked = _used_bits(block)
    size, itemsize = masked.shape[-1], masked.dtype.itemsize
    first, before = divmod(start * itemsize, _WORD)
    rows = np.ascontiguousarray(masked).reshape(-1).view(np.uint8).reshape(-1, size * itemsize)
    if before or rows.shape[1] % _WORD:
        padded = np.zeros((len(rows), -(-(before + rows.shape[1]) // _WORD) * _WORD), np.uint8)
        padded[:, before : before + rows.shape[1]] = rows
        rows = padded
    return rows.view(np.uint64), first


def _keys(dim: int, start: int, size: int) -> np.ndarray:
    """Returns the keys of some coordinates, odd numbers; dimensions count from the last, whose coordinate is words."""
    return (_few_keys if size <= _FEW else _make_keys)(dim, start, size)


def _make_keys(dim: int, start: int, size: int) -> np.ndarray:
    first, end = start // _TABLE, -(-(start + size) // _TABLE)
    numbers = np.arange(first, end, dtype=np.uint64) + np.uint64((2 * dim + 1) << 48)
    keys = np.multiply.outer(_mixed(numbers), _table(dim)).reshape(-1)
    return keys[start - first * _TABLE :][:size]


@functools.lru_cache(maxsize=64)
def _few_keys(dim: int, start: int, size: int) -> np.ndarray:
    return _make_keys(dim, start, size)


@functools.lru_cache(maxsize=64)
def _table(dim: int) -> np.ndarray:
    return _mixed(np.arange(_TABLE, dtype=np.uint64) + np.uint64((2 * dim + 2) << 48))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Returns an odd number for each number (the finalizer of splitmix64)."""
    mixed = numbers * _PLACE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


# Version 1: a hash of each element's bits and its place. What digest files had before version 2.


def of_elements(block: np.ndarray, starts: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the hash of a box of an array of the given shape; the first element of the box is at `starts`."""
    words = _element_words(block)
    dims = _merged(block.shape, starts, shape)
    total = 0
    for begin in range(0, words.shape[0], _CHUNK):
        part = words[begin : begin + _CHUNK]
        places = _places(begin, begin + len(part), dims)
        for word in range(part.shape[1]):  # two for complex128
            total += _sum_of_hashes(part[:, word], places * np.uint64(part.shape[1]) + np.uint64(word))
    return total & MASK


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


def _element_words(block: np.ndarray) -> np.ndarray:
    """Returns the bits of each element, as a row of unsigned integers."""
    flat = np.ascontiguousarray(_used_bits(block)).reshape(-1)
    size = flat.dtype.itemsize
    return flat.view(f"u{min(size, 8)}").reshape(flat.size, max(1, size // 8))


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


def _used_bits(block: np.ndarray) -> np.ndarray:
    """Returns the block; of types of less than a byte, bytes without the bits that may hold anything."""
    name = block.dtype.name
    for bits in (4, 2):
        if name.startswith((f"int{bits}", f"uint{bits}", f"float{bits}")) and block.dtype.itemsize == 1:
            return np.ascontiguousarray(block).view(np.uint8) & np.uint8((1 << bits) - 1)
    return block
