"""Puts small leaves into one vector of words and takes them out again, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from orbax_ext.plan import Leaf, Pack
from orbax_ext.transfer.blocks import Block, DeviceBlocks

_WORD = np.dtype(np.uint32)


def pack(
    bundle: Pack, replica_of: Mapping[jax.Device, int], read: Mapping[int, DeviceBlocks], leaves: Sequence[Leaf]
) -> DeviceBlocks:
    """Returns each device's vector, with the leaves that its replica has read."""
    sizes = _sizes(bundle, leaves)
    vectors = {device: np.zeros(bundle.words * _WORD.itemsize, np.uint8) for device in replica_of}
    for replica, leaf, _, at in bundle.places(sizes):
        for device in (device for device, row in replica_of.items() if row == replica):
            data = np.ascontiguousarray(read[leaf][device]).reshape(-1).view(np.uint8)
            vectors[device][at : at + sizes[leaf]] = data
    placed = jax.device_put([vector.view(_WORD) for vector in vectors.values()], list(vectors))
    return dict(zip(vectors, placed, strict=True))


def unpack(
    bundle: Pack, received: DeviceBlocks, blocks: Mapping[int, Block], leaves: Sequence[Leaf]
) -> dict[int, DeviceBlocks]:
    """Returns every leaf's block on each device, from the vectors of all replicas."""
    sizes = _sizes(bundle, leaves)
    data: dict[int, dict[jax.Device, np.ndarray]] = {leaf: {} for leaf in bundle.leaves}
    for device, vectors in received.items():
        rows = np.asarray(vectors).view(np.uint8).reshape(-1, bundle.words * _WORD.itemsize)
        for _, leaf, row, at in bundle.places(sizes):
            block = blocks[leaf]
            data[leaf][device] = rows[row, at : at + sizes[leaf]].view(block.dtype).reshape(block.shape)
    # One call for all: each costs far more than the few bytes that it places.
    devices = [device for by_device in data.values() for device in by_device]
    placed = iter(jax.device_put([block for by_device in data.values() for block in by_device.values()], devices))
    return {leaf: {device: next(placed) for device in by_device} for leaf, by_device in data.items()}


def _sizes(bundle: Pack, leaves: Sequence[Leaf]) -> dict[int, int]:
    return {leaf: leaves[leaf].block_bytes for leaf in bundle.leaves}
