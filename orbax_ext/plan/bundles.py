"""How leaves travel: each bundle is one operand of an exchange, with a block of equal shape on every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

_ALIGN = 8  # bytes; every dtype can be viewed at such an offset
_WORD = 4


@dataclasses.dataclass(frozen=True)
class Sum:
    """One leaf that one replica reads whole; the others contribute zeros and receive it by a sum."""

    leaf: int
    reader: int  # the replica that reads, a row of the table of replicas

    @property
    def leaves(self) -> tuple[int, ...]:
        return (self.leaf,)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Leaves with equal blocks that all replicas read, a disjoint share each, and receive by an all-gather.

    The axes of `splits` cut each leaf's block along a dimension. The other replica axes are lanes: along them each
    position reads another leaf, so there are as many leaves as lanes.
    """

    leaves: tuple[int, ...]  # by lane
    splits: tuple[tuple[str, int], ...]  # (replica axis, dimension of the block)
    lanes: tuple[str, ...]  # the other replica axes, in the mesh's order


@dataclasses.dataclass(frozen=True)
class Pack:
    """Many small leaves, dealt out to the replicas whole; each replica's share is one vector of words."""

    shares: tuple[tuple[int, ...], ...]  # for each replica, the leaves that it reads
    words: int  # of the largest share; the others are padded

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(leaf for share in self.shares for leaf in share)


Bundle = Sum | Stack | Pack


def make_pack(shares: tuple[tuple[int, ...], ...], sizes: Mapping[int, int]) -> Pack:
    """A pack of the given shares; `sizes` are the leaves' block bytes."""
    longest = max(sum(_padded(sizes[leaf]) for leaf in share) for share in shares)
    return Pack(shares, longest // _WORD)


def offsets(share: tuple[int, ...], sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """(leaf, byte offset) for each leaf of a share, in its replica's vector."""
    at = 0
    for leaf in share:
        yield leaf, at
        at += _padded(sizes[leaf])


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
