"""One device's share of a leaf, and the same bits as unsigned integers.

Every block travels as unsigned integers of the same width. Floating-point sums would turn -0.0 into +0.0, quiet
signalling NaNs and flush denormals, and XLA widens small types on some backends; sums of integers of which all but
one are zero are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orbax_ext.upstream import runtime

DeviceBlocks = Mapping[jax.Device, jax.Array]  # a block on each of this process's devices


@dataclasses.dataclass(frozen=True)
class Block:
    """One device's share of a leaf: what arrives, and the form in which it is handed in."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def carried_shape(self) -> tuple[int, ...]:
        """A scalar is handed in as a vector of one element."""
        return self.shape or (1,)

    @property
    def carried_dtype(self) -> Any:
        """Types of less than a byte are handed in as bytes: their layout in memory depends on who made them."""
        return jnp.dtype("uint8") if runtime.bits(self.dtype) < 8 else self.dtype


def encode(array: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the same bits as unsigned integers; complex numbers as two arrays of them."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return (*encode(lax.real(array)), *encode(lax.imag(array)))
    if array.dtype == jnp.bool_:
        return (array.astype(jnp.uint8),)
    return (lax.bitcast_convert_type(array, f"uint{runtime.bits(array.dtype)}"),)


def decode(words: Sequence[jax.Array], block: Block) -> jax.Array:
    """Returns the array that `encode` made these words from."""
    dtype = jnp.dtype(block.dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        half = Block(block.shape, np.zeros(0, dtype).real.dtype)
        return lax.complex(decode(words[:1], half), decode(words[1:], half))
    (only,) = words
    only = only.reshape(block.shape)
    if dtype == jnp.bool_:
        return only.astype(jnp.bool_)
    return lax.bitcast_convert_type(only.astype(f"uint{runtime.bits(dtype)}"), dtype)
