"""Small leaves in one vector of words, and out of it again, by way of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from orbax_ext.plan import Leaf, Pack
from orbax_ext.transfer.exchange import Block
from orbax_ext.transfer.reading import OnDevices

_WORD = np.dtype(np.uint32)


def pack(
    bundle: Pack, replica_of: Mapping[jax.Device, int], read: Mapping[int, OnDevices], leaves: Sequence[Leaf]
) -> dict[jax.Device, jax.Array]:
    """Each device's vector, with what its replica has read."""
    sizes = _sizes(bundle, leaves)
    vectors = {device: np.zeros(bundle.words * _WORD.itemsize, np.uint8) for device in replica_of}
    for replica, leaf, _, at in bundle.places(sizes):
        for device in (device for device, row in replica_of.items() if row == replica):
            data = np.ascontiguousarray(read[leaf][device]).reshape(-1).view(np.uint8)
            vectors[device][at : at + sizes[leaf]] = data
    vectors = {device: vector.view(_WORD) for device, vector in vectors.items()}
    placed = jax.device_put(list(vectors.values()), list(vectors))
    return dict(zip(vectors, placed, strict=True))


def unpack(
    bundle: Pack, received: OnDevices, blocks: Mapping[int, Block], leaves: Sequence[Leaf]
) -> dict[int, OnDevices]:
    """Every leaf's block on each device, out of all replicas' vectors."""
    sizes = _sizes(bundle, leaves)
    found: dict[int, dict[jax.Device, np.ndarray]] = {leaf: {} for leaf in bundle.leaves}
    for device, vectors in received.items():
        rows = np.asarray(vectors).view(np.uint8).reshape(-1, bundle.words * _WORD.itemsize)
        for _, leaf, row, at in bundle.places(sizes):
            block = blocks[leaf]
            found[leaf][device] = rows[row, at : at + sizes[leaf]].view(block.dtype).reshape(block.shape)
    # One call for all: each costs far more than the few bytes that it places.
    devices = [device for there in found.values() for device in there]
    placed = iter(jax.device_put([data for there in found.values() for data in there.values()], devices))
    return {leaf: {device: next(placed) for device in there} for leaf, there in found.items()}


def _sizes(bundle: Pack, leaves: Sequence[Leaf]) -> dict[int, int]:
    return {leaf: leaves[leaf].block_bytes for leaf in bundle.leaves}
