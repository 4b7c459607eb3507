"""Bits survive the way into unsigned integers and back, for every dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_ext.transfer.blocks import Block, decode, encode

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
]


def patterns(dtype: Any) -> np.ndarray:
    """Returns every bit pattern of a byte, in each byte of an element: signed zeros, denormals and NaNs among them."""
    if dtype == jnp.bool_:
        return np.array([False, True] * 8)
    size = jnp.dtype(dtype).itemsize
    return np.repeat(np.arange(256, dtype=np.uint8), size).view(jnp.dtype(dtype))


@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_survives(name: str) -> None:
    dtype = jnp.dtype(name)
    values = patterns(dtype)
    block = Block(values.shape, dtype)

    words = jax.jit(encode)(values)
    assert all(jnp.issubdtype(word.dtype, jnp.unsignedinteger) for word in words)
    returned = np.asarray(jax.jit(lambda *words: decode(words, block))(*words))
    assert returned.dtype == dtype
    assert returned.tobytes() == values.tobytes()


def test_a_scalar_is_handed_in_as_a_vector_and_comes_out_as_a_scalar() -> None:
    block = Block((), jnp.dtype("float32"))
    assert block.carried_shape == (1,)
    assert decode(encode(jnp.array([1.5])), block).shape == ()


@pytest.mark.parametrize(
    ("name", "carried"), [("int4", "uint8"), ("uint4", "uint8"), ("int8", "int8"), ("bool", "bool")]
)
def test_types_of_less_than_a_byte_are_handed_in_as_bytes(name: str, carried: str) -> None:
    assert Block((2,), jnp.dtype(name)).carried_dtype == jnp.dtype(carried)
