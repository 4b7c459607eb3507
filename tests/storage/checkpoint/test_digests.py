from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_ext.storage.checkpoint import digests

DTYPES = ["bool", "int4", "int8", "bfloat16", "float16", "float32", "int64", "complex64", "complex128"]


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    kind = jnp.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
    return raw.view(kind).reshape(shape)


def whole(array: Any) -> int:
    return digests.of_block(array, [0] * array.ndim, array.shape)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_digests_of_shards_add_up_however_a_leaf_is_cut(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3))
    shape = tuple(count * data.draw(st.integers(1, 4)) for count in parts)
    array = random_array(shape, data.draw(st.sampled_from(DTYPES)))
    shards = []
    for place in itertools.product(*map(range, parts)):
        sizes = [size // count for size, count in zip(shape, parts, strict=True)]
        starts = [number * size for number, size in zip(place, sizes, strict=True)]
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        shards.append(digests.of_block(array[box], starts, shape))
    assert digests.add(shards) == whole(array)


def test_the_digests_of_blocks_longer_than_a_chunk_add_up() -> None:
    array = random_array((300, 700), "float32")
    halves = [digests.of_block(array[:, start : start + 350], [0, start], array.shape) for start in (0, 350)]
    assert digests.add(halves) == whole(array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_changes_the_digest(dtype: str) -> None:
    array = random_array((4, 5), dtype)
    before = whole(array)
    seen = {before}
    for place in range(array.nbytes):
        changed = array.copy()
        changed.reshape(-1).view(np.uint8)[place] ^= 1
        seen.add(whole(changed))
    assert len(seen) == array.nbytes + 1


def test_elements_that_change_places_change_the_digest() -> None:
    array = np.arange(20.0)
    assert whole(array) != whole(array[::-1])


def test_zeros_of_either_sign_and_nans_have_different_digests() -> None:
    values = np.array([0x00000000, 0x80000000, 0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    assert len({whole(values[index : index + 1]) for index in range(4)}) == 4


def test_unused_bits_do_not_change_the_digest() -> None:
    low = np.array([1, 7], np.uint8)
    assert whole(low.view(jnp.dtype("int4"))) == whole((low | 0x50).view(jnp.dtype("int4")))


def test_folds_of_parts_add_up_to_the_fold_of_wholes() -> None:
    parts = {"a": [3, 5], "b": [1 << 63, 1 << 63 | 7]}
    halves = [digests.fold((name, values[half]) for name, values in parts.items()) for half in (0, 1)]
    assert digests.add(halves) == digests.fold((name, digests.add(values)) for name, values in parts.items())


def test_leaves_that_change_places_change_the_fold() -> None:
    assert digests.fold([("a", 1), ("b", 2)]) != digests.fold([("a", 2), ("b", 1)])


def test_a_digest_survives_its_text() -> None:
    assert digests.from_text(digests.to_text(0xDEADBEEF)) == 0xDEADBEEF
