"""What each process has of each leaf, as one short message: most leaves of a process have the same entry."""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence

_MOST_UNPACKED = 1 << 26  # bytes, so that a damaged message cannot fill the memory


def pack(loaded: Mapping[int, Sequence[int]]) -> str:
    """Returns the entries by leaf as text for the other processes."""
    kinds: dict[tuple[int, ...], int] = {}
    by_leaf = {leaf: kinds.setdefault(tuple(entry), len(kinds)) for leaf, entry in loaded.items()}
    steps = [leaf - before for before, leaf in itertools.pairwise([0, *by_leaf])]  # mostly ones, which compress well
    content = json.dumps([list(kinds), steps, list(by_leaf.values())], separators=(",", ":"))
    return base64.b85encode(zlib.compress(content.encode(), 9)).decode()


def unpack(packed: str) -> dict[int, tuple[int, ...]]:
    """Returns the entries that `pack` packed."""
    decompress = zlib.decompressobj()
    content = decompress.decompress(base64.b85decode(packed), _MOST_UNPACKED)
    if not decompress.eof:
        raise ValueError("a message of what a process has loaded is cut short or too long")
    kinds, steps, numbers = json.loads(content)
    leaves = itertools.accumulate(map(int, steps))
    entries = [tuple(map(int, kind)) for kind in kinds]
    return {leaf: entries[number] for leaf, number in zip(leaves, numbers, strict=True)}
