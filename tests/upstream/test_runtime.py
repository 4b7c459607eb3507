from __future__ import annotations

import jax
import numpy as np
import pytest

from orbax_ext.upstream import runtime


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bool", 8), ("int4", 4), ("uint16", 16), ("bfloat16", 16), ("float32", 32)]
)
def test_bits_are_those_of_one_element(dtype: str, expected: int) -> None:
    assert runtime.bits(jax.numpy.dtype(dtype)) == expected


@pytest.mark.parametrize("weak_type", [False, True])
def test_a_joined_array_can_have_a_weak_type(weak_type: bool) -> None:
    part = jax.numpy.asarray(np.zeros(()))
    joined = runtime.join_arrays((), part.dtype, part.sharding, [part], weak_type=weak_type)
    assert joined.weak_type is weak_type


def test_tracing_is_true_only_inside_jit() -> None:
    traced = []

    def step(x: jax.Array) -> jax.Array:
        traced.append(runtime.tracing())
        return x

    jax.jit(step)(1)
    assert traced == [True]
    assert not runtime.tracing()
