"""Deals leaves and slices to replicas by the rates at which they read. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from orbax_ext.plan.bundles import Bundle, LeafBatch, Sum, make_pack
from orbax_ext.plan.leaves import Leaf

_SMALL = 128 << 10  # bytes of a block below which a leaf is packed: an operand of its own costs more
_AHEAD = 2.0  # times that a group takes: no reader is dealt a piece that takes it longer


class ShareLoads:
    """How long each replica will have read, in the order in which leaves are dealt."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = tuple(rates)
        self._seconds = [0.0] * len(self.rates)
        self._target = 0.0
        self._longest = math.inf

    @classmethod
    def only(cls, reader: int, replicas: int) -> ShareLoads:
        """Returns the loads where one replica reads everything."""
        return cls([float(replica == reader) for replica in range(replicas)])

    def grow(self, size: int) -> None:
        """Takes note that so many bytes are dealt next."""
        self._target += size / sum(self.rates)
        self._longest = _AHEAD * size / sum(self.rates)

    def able(self, size: int) -> int:
        """Returns how many replicas may be dealt so many bytes at once."""
        return max(1, sum(bool(rate) and size / rate <= self._longest for rate in self.rates))

    def overloaded(self, piece: int) -> frozenset[int]:
        """Deals one piece to each replica; returns those for which that is too much."""
        slack = len(self.rates) * piece / sum(self.rates) / 2
        over = set()
        for replica, rate in enumerate(self.rates):
            seconds = piece / rate if rate else math.inf
            if seconds > self._longest or self._seconds[replica] + seconds > self._target + slack:
                over.add(replica)
            else:
                self._seconds[replica] += seconds
        return frozenset(over)

    def give_back(self, piece: int, absent: Collection[int]) -> None:
        """Undoes `overloaded`, which returned `absent`."""
        for replica, rate in enumerate(self.rates):
            if replica not in absent:
                self._seconds[replica] -= piece / rate

    def deal(self, size: int) -> int:
        """Returns the replica that would have read so many bytes more first."""

        def ends(replica: int) -> tuple[bool, float, int]:
            seconds = size / self.rates[replica]
            return seconds > self._longest, self._seconds[replica] + seconds, replica

        reader = min((replica for replica, rate in enumerate(self.rates) if rate), key=ends)
        self._seconds[reader] += size / self.rates[reader]
        return reader


def dealt_bundles(missing: Sequence[int], leaves: Sequence[Leaf], loads: ShareLoads) -> tuple[Bundle, ...]:
    sizes = {index: leaves[index].block_bytes for index in missing}
    small: list[list[int]] = [[] for _ in loads.rates]
    equals: dict[tuple[tuple[int, ...], str], list[list[int]]] = {}
    for index in sorted(missing, key=lambda index: (-sizes[index], index)):
        reader = loads.deal(sizes[index])
        if sizes[index] >= _SMALL:
            kind = leaves[index].block, leaves[index].dtype
            equals.setdefault(kind, [[] for _ in loads.rates])[reader].append(index)
        else:
            small[reader].append(index)
    bundles = [bundle for shares in equals.values() for bundle in _batched(shares)]
    if any(small):
        bundles.append(make_pack(tuple(map(tuple, small)), sizes))
    return tuple(bundles)


def _batched(shares: Sequence[Sequence[int]]) -> Iterator[Bundle]:
    """Yields bundles of equal leaves, given those that each replica reads: gathered or summed, what moves less."""
    for batch in itertools.zip_longest(*shares):
        if 2 * sum(leaf is not None for leaf in batch) > len(shares):
            yield LeafBatch(batch)
        else:
            yield from (Sum(leaf, replica) for replica, leaf in enumerate(batch) if leaf is not None)
