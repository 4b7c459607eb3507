"""How leaves travel: each bundle is one operand of an exchange, with a block of equal shape on every device."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

_ALIGN = 8  # bytes; every dtype can be viewed at such an offset
_WORD = 4

BlockBytes = Mapping[int, int] | Sequence[int]  # by index of the leaf: bytes of the block that a device holds


@dataclasses.dataclass(frozen=True)
class BundleRead:
    """Equal leaves that one replica reads whole, or that all replicas read together."""

    leaves: tuple[int, ...]
    replica: int | None  # None: all replicas, as a `LaneBatch` with these splits and lanes
    splits: tuple[tuple[str, int], ...] = ()
    lanes: tuple[str, ...] = ()


class _Operand(abc.ABC):
    """What a bundle reads and moves, in bytes on each device of each replica."""

    @abc.abstractmethod
    def reads(self) -> Iterator[BundleRead]:
        """Yields what is read from storage, and by which replica."""

    @abc.abstractmethod
    def read_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        """Returns the bytes that each replica reads."""

    def offered_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        """Returns the bytes that each replica has for the others; padding that travels is counted."""
        return self.read_bytes(sizes, replicas)

    def summed_bytes(self, sizes: BlockBytes) -> int:
        """Returns the bytes of one device's operand if the bundle travels by a sum, and 0 if it is gathered."""
        return 0

    def arrays_read(self, replicas: int) -> float:
        """Returns how many arrays a process opens if it reads for this bundle, on average."""
        return 1


@dataclasses.dataclass(frozen=True)
class Sum(_Operand):
    """One leaf that one replica reads whole; the others contribute zeros and receive it by a sum."""

    leaf: int
    reader: int  # the replica that reads, a row of the table of replicas

    @property
    def leaves(self) -> tuple[int, ...]:
        return (self.leaf,)

    def reads(self) -> Iterator[BundleRead]:
        yield BundleRead(self.leaves, self.reader)

    def read_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        read = np.zeros(replicas, np.int64)
        read[self.reader] = sizes[self.leaf]
        return read

    def summed_bytes(self, sizes: BlockBytes) -> int:
        return sizes[self.leaf]


@dataclasses.dataclass(frozen=True)
class ColumnSum(_Operand):
    """One leaf of which different replicas read different blocks, because no replica can read all of them.

    It travels like a `Sum`: whoever does not read a block contributes zeros.
    """

    leaf: int
    readers: tuple[int, ...]  # by column of the table of replicas: the replica that reads the block there

    reader: ClassVar[None] = None  # several replicas read

    @property
    def leaves(self) -> tuple[int, ...]:
        return (self.leaf,)

    def reads(self) -> Iterator[BundleRead]:
        """Yields one read of all blocks, as if one replica read them: as many bytes, if not by the same processes."""
        yield BundleRead(self.leaves, self.readers[0])

    def read_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        """Returns the bytes that each replica reads, on average over its devices."""
        read: np.ndarray = np.bincount(self.readers, minlength=replicas) * sizes[self.leaf] // len(self.readers)
        return read

    def summed_bytes(self, sizes: BlockBytes) -> int:
        return sizes[self.leaf]


@dataclasses.dataclass(frozen=True)
class LaneBatch(_Operand):
    """Leaves with equal blocks; every replica reads a disjoint share of them and receives the rest by an all-gather.

    The axes of `splits` cut each leaf's block along a dimension. The other replica axes are lanes: along them each
    position reads another leaf, so there are as many leaves as lanes.
    """

    leaves: tuple[int, ...]  # by lane
    splits: tuple[tuple[str, int], ...]  # (replica axis, dimension of the block)
    lanes: tuple[str, ...]  # the other replica axes, in the mesh's order
    absent: tuple[int, ...] = ()  # replicas that do not read; what they would have read is dealt to others

    reader: ClassVar[None] = None  # all replicas read

    def reads(self) -> Iterator[BundleRead]:
        yield BundleRead(self.leaves, None, self.splits, self.lanes)

    def read_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        read = np.full(replicas, sum(sizes[leaf] for leaf in self.leaves) // replicas)
        read[list(self.absent)] = 0
        return read

    def offered_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        return np.full(replicas, sum(sizes[leaf] for leaf in self.leaves) // replicas)


@dataclasses.dataclass(frozen=True)
class LeafBatch(_Operand):
    """Leaves with equal blocks of which each replica reads one whole, or none; an all-gather brings them to all."""

    shares: tuple[int | None, ...]  # by replica: the leaf that it reads

    reader: ClassVar[None] = None  # several replicas read

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(leaf for leaf in self.shares if leaf is not None)

    def reads(self) -> Iterator[BundleRead]:
        for replica, leaf in enumerate(self.shares):
            if leaf is not None:
                yield BundleRead((leaf,), replica)

    def read_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        return np.array([0 if leaf is None else sizes[leaf] for leaf in self.shares], np.int64)

    def offered_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        return np.full(replicas, sizes[self.leaves[0]])


@dataclasses.dataclass(frozen=True)
class Pack(_Operand):
    """Many small leaves, dealt out to the replicas whole, that travel as vectors of words.

    Either each replica's share is a vector and all vectors are gathered, or one vector holds all shares, each replica
    fills in its own, and the vectors are summed. A sum moves twice the bytes, but needs no padding.
    """

    shares: tuple[tuple[int, ...], ...]  # for each replica, the leaves that it reads
    words: int  # of a replica's vector; if gathered, shorter shares are padded
    summed: bool = False

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(leaf for share in self.shares for leaf in share)

    @property
    def reader(self) -> int | None:
        """The replica that reads all leaves, or None if several replicas read."""
        readers = [replica for replica, share in enumerate(self.shares) if share]
        return readers[0] if len(readers) == 1 else None

    def places(self, sizes: BlockBytes) -> Iterator[tuple[int, int, int, int]]:
        """Yields (replica, leaf, row, byte offset) for each leaf in the vectors that arrive."""
        offset = 0
        for replica, share in enumerate(self.shares):
            offset = offset if self.summed else 0
            for leaf in share:
                yield replica, leaf, 0 if self.summed else replica, offset
                offset += padded(sizes[leaf])

    def reads(self) -> Iterator[BundleRead]:
        for replica, share in enumerate(self.shares):
            for leaf in share:
                yield BundleRead((leaf,), replica)

    def arrays_read(self, replicas: int) -> float:
        return len(self.leaves) if self.reader is not None else len(self.leaves) / replicas

    def read_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        return np.array([sum(sizes[leaf] for leaf in share) for share in self.shares], np.int64)

    def offered_bytes(self, sizes: BlockBytes, replicas: int) -> np.ndarray:
        return self.read_bytes(sizes, replicas) if self.summed else np.full(replicas, self.words * _WORD)

    def summed_bytes(self, sizes: BlockBytes) -> int:
        return self.words * _WORD if self.summed else 0


Bundle = Sum | ColumnSum | LaneBatch | LeafBatch | Pack


def make_pack(shares: tuple[tuple[int, ...], ...], sizes: BlockBytes) -> Pack:
    """Returns a pack of the given shares, summed or gathered, whichever moves fewer bytes."""
    lengths = [sum(padded(sizes[leaf]) for leaf in share) for share in shares]
    summed = len(shares) * max(lengths) > 2 * sum(lengths)
    return Pack(shares, (sum(lengths) if summed else max(lengths)) // _WORD, summed)


def padded(size: int) -> int:
    """Returns the bytes that a block of so many bytes takes in a vector."""
    return -(-size // _ALIGN) * _ALIGN
