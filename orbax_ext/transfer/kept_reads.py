"""What was read for exchanges, until the first one begins: if nothing is exchanged after all, it is not read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from orbax_ext.transfer import reading
from orbax_ext.transfer.boxes import HostBlocks, ReadItem
from orbax_ext.transfer.donation import elsewhere
from orbax_ext.transfer.reading import Blocks


class KeptReads:
    """Leaves of which this process has read, for exchanges, all that it holds."""

    def __init__(self) -> None:
        self._blocks: dict[int, Blocks] = {}
        self._ended = False

    @property
    def bytes(self) -> int:
        return sum(int(block.nbytes) for blocks in self._blocks.values() for block in blocks.values())

    def add(self, items: Iterable[ReadItem], read: Mapping[int, Blocks]) -> None:
        """Keeps those of the items that are whole on all devices of this process, and still on the host."""
        if not self._ended:
            self._blocks.update((item.index, read[item.index]) for item in items if _is_whole(item, read[item.index]))

    def take(self, leaves: Iterable[int]) -> dict[int, Blocks]:
        """Returns those of the leaves that are kept, and keeps them no longer."""
        return {leaf: self._blocks.pop(leaf) for leaf in leaves if leaf in self._blocks}

    def end(self) -> None:
        """Keeps nothing from now on."""
        self._blocks, self._ended = {}, True


def copies(kept: Mapping[int, Blocks]) -> dict[int, HostBlocks]:
    """Returns the same blocks in memory that does not travel, from which JAX copies."""
    return {
        leaf: {device: elsewhere(np.asarray(block)) for device, block in blocks.items()}
        for leaf, blocks in kept.items()
    }


def _is_whole(item: ReadItem, blocks: Blocks) -> bool:
    request = item.request
    as_it_is = item.leaf.slice is None and item.block.shape == request.leaf.block
    return as_it_is and reading.on_host(blocks) and blocks.keys() == request.sharding.addressable_devices
