"""Puts small leaves into one vector of words and takes them out again, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_ext.plan import Leaf, Pack
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
        self._places: dict[int, dict[jax.Device, np.ndarray]] = {
            leaf: {device: self._vectors[device].view(np.uint8)[at : at + sizes[leaf]] for device in rows[replica]}
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
        return {device: _copy(vector) for device, vector in self._vectors.items()} if elsewhere else self._vectors


def unpack(
    bundle: Pack, received: DeviceBlocks, blocks: Mapping[int, Block], leaves: Sequence[Leaf]
) -> dict[int, HostBlocks]:
    """Returns every leaf's block for each device, from the vectors of all replicas: on the host, to be copied."""
    sizes = _sizes(bundle, leaves)
    data: dict[int, dict[jax.Device, np.ndarray]] = {leaf: {} for leaf in bundle.leaves}
    for device, vectors in received.items():
        words = np.asarray(vectors)
        rows = words.view(np.uint8).reshape(-1, bundle.words * _WORD.itemsize)
        start = words.ctypes.data
        for _, leaf, row, at in bundle.places(sizes):
            block = blocks[leaf]
            place = rows[row, at : at + sizes[leaf]]
            if is_aligned(start + row * rows.shape[1] + at):  # JAX would keep the whole vector for this leaf
                place, words_there = unaligned_empty(place.shape, np.uint8), place
                place[...] = words_there
            data[leaf][device] = place.view(block.dtype).reshape(block.shape)
    return {**data}


def _copy(vector: np.ndarray) -> np.ndarray:
    copy = aligned_empty(vector.shape, vector.dtype)
    copy[...] = vector
    return copy


def _sizes(bundle: Pack, leaves: Sequence[Leaf]) -> dict[int, int]:
    return {leaf: leaves[leaf].block_bytes for leaf in bundle.leaves}
