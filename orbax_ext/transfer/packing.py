"""Puts small leaves into one vector of words and takes them out again, on the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_ext.plan import Leaf, Pack
from orbax_ext.plan.bundles import padded
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.boxes import HostBlocks, aligned_empty, is_aligned, unaligned_empty

_WORD = np.dtype(np.uint32)


class Vectors:
    """The vector of each of this process's devices, with a place for every leaf that the device's replica reads."""

    def __init__(self, bundle: Pack, replica_of: Mapping[jax.Device, int], leaves: Sequence[Leaf]) -> None:
        sizes = _sizes(bundle, leaves)
        self._vectors = {device: aligned_empty((bundle.words,), _WORD) for device in replica_of}
        for vector in self._vectors.values():
            vector[...] = 0  # what others read, and padding
        rows: dict[int, list[jax.Device]] = {}
        for device, replica in replica_of.items():
            rows.setdefault(replica, []).append(device)
        in_bytes = {device: vector.view(np.uint8) for device, vector in self._vectors.items()}
        self._places: dict[int, dict[jax.Device, np.ndarray]] = {
            leaf: {device: in_bytes[device][at : at + sizes[leaf]] for device in rows[replica]}
            for replica, leaf, _, at in bundle.places(sizes)
            if replica in rows
        }
        self._buffers: dict[int, dict[jax.Device, np.ndarray]] = {}

    def buffers(self, leaf: int, block: Block) -> dict[jax.Device, np.ndarray]:
        """Returns a leaf's place in each vector, to read into."""
        places = self._places[leaf].items()
        self._buffers[leaf] = {device: place.view(block.dtype).reshape(block.shape) for device, place in places}
        return self._buffers[leaf]

    def filled(self, read: Mapping[int, Mapping[jax.Device, Any]]) -> dict[jax.Device, np.ndarray]:
        """Returns the vectors, with the leaves that were not read into them copied to their places."""
        elsewhere = False
        for leaf, places in self._places.items():
            if leaf not in read:  # by this process: others read it in its place, and what is handed in is not used
                continue
            for device, place in places.items():
                if read[leaf][device] is not self._buffers.get(leaf, {}).get(device):
                    place[...] = np.ascontiguousarray(read[leaf][device]).reshape(-1).view(np.uint8)
                    elsewhere = True
        # A read that was asked for again may still write into its first place.
        if not elsewhere:
            return self._vectors
        return {device: _copy(vector, aligned_empty) for device, vector in self._vectors.items()}


def unpack(
    bundle: Pack, received: DeviceBlocks, blocks: Mapping[int, Block], leaves: Sequence[Leaf]
) -> dict[int, HostBlocks]:
    """Returns every leaf's block for each device, from the vectors of all replicas: on the host, to be copied."""
    runs = _runs(bundle, blocks, _sizes(bundle, leaves))
    data: dict[int, dict[jax.Device, np.ndarray]] = {leaf: {} for leaf in bundle.leaves}
    for device, vectors in received.items():
        words = np.asarray(vectors)
        if is_aligned(words.ctypes.data):  # then most blocks are, and JAX would keep the whole vector for each of them
            words = _copy(words, unaligned_empty)
        rows = words.view(np.uint8).reshape(-1, bundle.words * _WORD.itemsize)
        for run in runs:
            for leaf, block in zip(run.leaves, run.blocks(rows), strict=True):
                data[leaf][device] = block
    return {**data}


@dataclasses.dataclass
class _Run:
    """Leaves with equal blocks, one after the other in a vector: a view of all makes views of each at little cost."""

    block: Block
    row: int  # of the vectors that arrive
    at: int  # bytes before the first leaf
    step: int  # bytes from leaf to leaf
    leaves: list[int]

    def blocks(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the block of each leaf, nowhere at an address that JAX would use without a copy."""
        shape, dtype = self.block.shape, self.block.dtype
        count, size = len(self.leaves), math.prod(shape) * dtype.itemsize
        all_bytes = rows[self.row, self.at : self.at + count * self.step].reshape(count, self.step)
        first = all_bytes.ctypes.data
        blocks = [part.reshape(shape) for part in all_bytes[:, :size].view(dtype)]
        for place, block in enumerate(blocks):
            if is_aligned(first + place * self.step):
                blocks[place] = _copy(block, unaligned_empty)
        return blocks


def _runs(bundle: Pack, blocks: Mapping[int, Block], sizes: Mapping[int, int]) -> list[_Run]:
    runs: list[_Run] = []
    for _, leaf, row, at in bundle.places(sizes):
        last = runs[-1] if runs else None
        if last and (last.block, last.row, last.at + len(last.leaves) * last.step) == (blocks[leaf], row, at):
            last.leaves.append(leaf)
        else:
            runs.append(_Run(blocks[leaf], row, at, padded(sizes[leaf]), [leaf]))
    return runs


def _copy(array: np.ndarray, make: Callable[..., np.ndarray]) -> np.ndarray:
    copy = make(array.shape, array.dtype)
    copy[...] = array
    return copy


def _sizes(bundle: Pack, leaves: Sequence[Leaf]) -> dict[int, int]:
    return {leaf: leaves[leaf].block_bytes for leaf in bundle.leaves}
