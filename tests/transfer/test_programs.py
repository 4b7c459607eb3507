"""The programs that put slices together, on one device."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_ext.plan import Slice
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.programs import Assembler

pytestmark = pytest.mark.once

# Negative zero, the smallest denormals, signalling and quiet NaNs with payloads.
SPECIAL = {
    "float32": [0x80000000, 0x00000001, 0x80000001, 0x7F800001, 0xFF812345, 0x7FC12345],
    "float64": [1 << 63, 1, (1 << 63) + 1, (0x7FF << 52) + 1, (0xFFF << 52) + 0x12345, (0x7FF8 << 48) + 0x12345],
    "bfloat16": [0x8000, 0x0001, 0x7F81, 0xFF85, 0x7FC5],
}
DTYPES = ["float32", "bfloat16", "bool", "complex64", "uint32", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_become_the_leaf_with_no_memory_but_that_of_both(dtype: str) -> None:
    device = jax.local_devices()[0]
    data = np.random.default_rng(0).integers(0, 2, (8, 1024)).astype(jnp.dtype(dtype))
    whole, piece = Block((8, 1024), jnp.dtype(dtype)), Block((4, 1024), jnp.dtype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of donated memory that nothing can use
        assembler = Assembler(whole, piece, 0, (device,))
    words = None
    for start in (4, 0):
        piece_there = {device: jax.device_put(data[start : start + 4], device)}
        words = assembler.place(words, Slice(0, 0, start, 4), piece_there)
    assert words is not None
    assert np.asarray(assembler.finish(words)[device]).tobytes() == data.tobytes()

    if assembler._finish is None:
        assert dtype != "bfloat16"
    else:
        assert dtype == "bfloat16"
        assert assembler._finish.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "complex128", "float16", "float8_e5m2", "uint64", "int16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_bit_of_a_slice_is_kept(dtype: str, dim: int) -> None:
    """Among random bits are NaNs of all kinds, infinities, -0.0 and denormals."""
    device, numpy_dtype = jax.local_devices()[0], jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        words = rng.integers(0, 256, 64 * 64 * numpy_dtype.itemsize, np.uint8)
        if dtype == "bool":
            words %= 2
        data = words.view(numpy_dtype).reshape(64, 64)
        number = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        if number in SPECIAL:
            words.view(f"uint{8 * jnp.dtype(number).itemsize}")[: len(SPECIAL[number])] = SPECIAL[number]
        whole = Block(data.shape, numpy_dtype)
        piece = Block((32, 64) if dim == 0 else (64, 32), numpy_dtype)
        assembler = Assembler(whole, piece, dim, (device,))
        holed = Assembler(whole, whole, 0, (device,))
        given = np.where(np.arange(64).reshape((64, 1) if dim == 0 else (1, 64)) < 32, data, data[:1, :1])
        filled = holed.place(None, Slice(0, 0, 0, 64), {device: jax.device_put(given, device)})
        blocks = None
        for start in (32, 0):
            rows = data[start : start + 32] if dim == 0 else data[:, start : start + 32]
            placed = {device: jax.device_put(np.ascontiguousarray(rows), device)}
            blocks = assembler.place(blocks, Slice(0, dim, start, 32), placed)
            if start == 32:  # the hole of a leaf that has arrived already
                filled = assembler.place(filled, Slice(0, dim, start, 32), placed)
        assert blocks is not None
        assert np.asarray(assembler.finish(blocks)[device]).tobytes() == data.tobytes()
        assert np.asarray(assembler.finish(filled)[device]).tobytes() == data.tobytes()
