"""Small leaves go into a vector and come out of it again, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_ext.plan import Leaf
from orbax_ext.plan.bundles import Pack, make_pack
from orbax_ext.transfer import boxes, packing
from orbax_ext.transfer.blocks import Block

pytestmark = pytest.mark.once

VALUES = [
    np.array([-0.0, np.nan, 1.5], np.float32),
    np.array(True),
    np.arange(5, dtype=np.int8).reshape(5, 1),
    np.array([1, 2**31], np.uint32),
    np.array([0.5, -0.0, 3], jnp.bfloat16),
]
LEAVES = [Leaf(str(n), v.shape, v.dtype.name, v.dtype.itemsize, v.shape, mesh=0) for n, v in enumerate(VALUES)]
BLOCKS = {n: Block(v.shape, v.dtype) for n, v in enumerate(VALUES)}
SIZES = {n: leaf.block_bytes for n, leaf in enumerate(LEAVES)}


def gathered(bundle: Pack, vectors: list[np.ndarray]) -> np.ndarray:
    """Returns what an exchange makes of the vectors of all replicas."""
    return sum(vectors[1:], start=vectors[0]) if bundle.summed else np.concatenate(vectors)


@pytest.mark.parametrize(
    ("shares", "summed"),
    [(((0, 1), (2, 3, 4)), False), (((0, 1, 2, 3, 4), (), ()), True), (((4,), (3,), (2, 1, 0)), False)],
    ids=["two replicas", "one reader of three", "three replicas"],
)
def test_what_replicas_pack_is_what_comes_out(shares: tuple[tuple[int, ...], ...], summed: bool) -> None:
    (device,) = jax.local_devices()[:1]
    bundle = make_pack(shares, SIZES)
    assert bundle.summed == summed
    vectors = []
    for replica, share in enumerate(shares):
        read = {leaf: {device: jax.device_put(VALUES[leaf].reshape(BLOCKS[leaf].carried_shape))} for leaf in share}
        vector = packing.Vectors(bundle, {device: replica}, LEAVES).filled(read)[device]
        assert vector.shape == (bundle.words,)
        vectors.append(np.asarray(vector))

    unpacked = packing.unpack(bundle, {device: jax.device_put(gathered(bundle, vectors))}, BLOCKS, LEAVES)

    for leaf, value in enumerate(VALUES):
        result = np.asarray(unpacked[leaf][device])
        assert (result.dtype, result.shape, result.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_padding_stays_zero() -> None:
    (device,) = jax.local_devices()[:1]
    bundle = make_pack(((0, 1), (2,)), SIZES)
    read = {2: {device: jax.device_put(VALUES[2])}}
    vector = packing.Vectors(bundle, {device: 1}, LEAVES).filled(read)[device].view(np.uint8)
    assert vector[: SIZES[2]].tobytes() == VALUES[2].tobytes()
    assert not vector[SIZES[2] :].any()


@pytest.mark.parametrize("size", [3, 8, 64, 100])
def test_blocks_that_arrive_are_nowhere_at_an_address_that_jax_would_keep(size: int) -> None:
    """JAX would keep the whole vector for such a block, and a step could not reuse its memory."""
    (device,) = jax.local_devices()[:1]
    values = [np.arange(number, number + size, dtype=np.uint8) for number in range(20)]
    leaves = [Leaf(str(n), v.shape, "uint8", 1, v.shape, mesh=0) for n, v in enumerate(values)]
    blocks = {n: Block(v.shape, v.dtype) for n, v in enumerate(values)}
    bundle = make_pack((tuple(range(20)),), dict.fromkeys(blocks, size))
    read = {n: {device: value} for n, value in enumerate(values)}
    vector = packing.Vectors(bundle, {device: 0}, leaves).filled(read)[device]

    unpacked = packing.unpack(bundle, {device: jax.device_put(vector, device)}, blocks, leaves)

    for leaf, value in enumerate(values):
        block = unpacked[leaf][device]
        assert block.tobytes() == value.tobytes()
        assert not boxes.is_aligned(block.ctypes.data)
