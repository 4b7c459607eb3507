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
class LaneBatch:
    """Leaves with equal blocks that all replicas read, a disjoint share each, and receive by an all-gather.

    The axes of `splits` cut each leaf's block along a dimension. The other replica axes are lanes: along them each
    position reads another leaf, so there are as many leaves as lanes.
    """

    leaves: tuple[int, ...]  # by lane
    splits: tuple[tuple[str, int], ...]  # (replica axis, dimension of the block)
    lanes: tuple[str, ...]  # the other replica axes, in the mesh's order


@dataclasses.dataclass(frozen=True)
class Pack:
    """Many small leaves, dealt out to the replicas whole, that travel as vectors of words.

    Either each replica's share is a vector and all are gathered, or there is one vector for all shares, zero but for a
    replica's own, and they are summed: a sum costs twice the bytes, but pads nothing.
    """

    shares: tuple[tuple[int, ...], ...]  # for each replica, the leaves that it reads
    words: int  # of a replica's vector; if gathered, shorter shares are padded
    summed: bool = False

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(leaf for share in self.shares for leaf in share)

    @property
    def reader(self) -> int | None:
        """The replica that reads all of it, if one does."""
        readers = [replica for replica, share in enumerate(self.shares) if share]
        return readers[0] if len(readers) == 1 else None

    def places(self, sizes: Mapping[int, int]) -> Iterator[tuple[int, int, int, int]]:
        """(replica, leaf, row, byte offset) for each leaf in the vectors that arrive; `sizes` are block bytes."""
        at = 0
        for replica, share in enumerate(self.shares):
            at = at if self.summed else 0
            for leaf in share:
                yield replica, leaf, 0 if self.summed else replica, at
                at += _padded(sizes[leaf])


Bundle = Sum | LaneBatch | Pack


def make_pack(shares: tuple[tuple[int, ...], ...], sizes: Mapping[int, int]) -> Pack:
    """A pack of the given shares, the way that moves fewer bytes; `sizes` are the leaves' block bytes."""
    lengths = [sum(_padded(sizes[leaf]) for leaf in share) for share in shares]
    summed = len(shares) * max(lengths) > 2 * sum(lengths)
    return Pack(shares, (sum(lengths) if summed else max(lengths)) // _WORD, summed)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
