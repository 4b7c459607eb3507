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

DTYPES = ["float32", "bfloat16", "bool", "complex64", "uint32", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_become_the_leaf_with_no_memory_but_that_of_both(dtype: str) -> None:
    device = jax.local_devices()[0]
    data = np.random.default_rng(0).integers(0, 2, (8, 1024)).astype(jnp.dtype(dtype))
    whole, piece = Block((8, 1024), jnp.dtype(dtype)), Block((4, 1024), jnp.dtype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of donated memory that nothing can use
        assembler = Assembler(whole, piece, 0, (device,))
    words = assembler.begin()
    for start in (4, 0):
        piece_there = {device: jax.device_put(data[start : start + 4], device)}
        words = assembler.place(words, Slice(0, 0, start, 4), piece_there)
    assert np.asarray(assembler.finish(words)[device]).tobytes() == data.tobytes()

    used = assembler._finish.memory_analysis()
    assert used.temp_size_in_bytes == 0
    assert used.alias_size_in_bytes == (data.nbytes if dtype == "uint32" else 0)  # words may stay where they are
