from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

from orbax_ext.upstream import runtime
from tests.support import compilation_cache


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


def test_another_thread_gets_the_settings_of_this_one() -> None:
    mesh = jax.make_mesh((1,), ("mine",))

    def seen() -> tuple[object, bool, object]:
        return jax.sharding.get_mesh(), jax.config.jax_enable_x64, jax.numpy.zeros(1, float).dtype

    def in_thread(before: Callable[[], None]) -> tuple[object, bool, object]:
        with concurrent.futures.ThreadPoolExecutor(1, initializer=before) as thread:
            return thread.submit(seen).result()

    with jax.set_mesh(mesh), jax.enable_x64(True):
        mine, apply = seen(), runtime.settings_of_thread()
    assert mine[0] == mesh
    assert in_thread(apply) == mine
    assert in_thread(lambda: None) == seen() != mine


def test_tracing_is_true_only_inside_jit() -> None:
    traced = []

    def step(x: jax.Array) -> jax.Array:
        traced.append(runtime.tracing())
        return x

    jax.jit(step)(1)
    assert traced == [True]
    assert not runtime.tracing()


def test_the_persistent_cache_keeps_programs_that_compile_quickly(tmp_path: pathlib.Path) -> None:
    with compilation_cache.of_a_user(tmp_path):
        jax.jit(lambda x: x + 2).lower(np.ones(3)).compile()
        assert list(tmp_path.glob("*-cache")) == []  # JAX keeps only what took a second
        with runtime.every_program_cached():
            jax.jit(lambda x: x + 3).lower(np.ones(3)).compile()
        assert len(list(tmp_path.glob("*-cache"))) == 1
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
