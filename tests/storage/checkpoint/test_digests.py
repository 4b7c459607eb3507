from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_ext.storage.checkpoint import digests, hashes

DTYPES = ["bool", "int4", "int8", "bfloat16", "float16", "float32", "int64", "complex64", "complex128"]


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    kind = jnp.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
    return raw.view(kind).reshape(shape)


VERSIONS = pytest.mark.parametrize("version", [1, 2])


def whole(array: Any, version: int = digests.CURRENT) -> int:
    return digests.of_block(array, [0] * array.ndim, array.shape, version)


@VERSIONS
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_digests_of_shards_add_up_however_a_leaf_is_cut(version: int, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3))
    shape = tuple(count * data.draw(st.integers(1, 4)) for count in parts)
    array = random_array(shape, data.draw(st.sampled_from(DTYPES)))
    shards = []
    for place in itertools.product(*map(range, parts)):
        sizes = [size // count for size, count in zip(shape, parts, strict=True)]
        starts = [number * size for number, size in zip(place, sizes, strict=True)]
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        shards.append(digests.of_block(array[box], starts, shape, version))
    assert digests.add(shards) == whole(array, version)


@VERSIONS
def test_the_digests_of_blocks_longer_than_a_chunk_add_up(version: int) -> None:
    array = random_array((300, 700), "float32")
    halves = [digests.of_block(array[:, start : start + 350], [0, start], array.shape, version) for start in (0, 350)]
    assert digests.add(halves) == whole(array, version)


@pytest.mark.parametrize(("shape", "cut"), [((3_000_001,), 1_700_003), ((700_000, 3), 600_001), ((2, 5, 70_001), 1)])
def test_the_digests_of_blocks_longer_than_a_slab_add_up(shape: tuple[int, ...], cut: int) -> None:
    array = random_array(shape, "float32")
    rest = [0] * (len(shape) - 1)
    halves = [digests.of_block(array[:cut], [0, *rest], shape), digests.of_block(array[cut:], [cut, *rest], shape)]
    assert digests.add(halves) == whole(array)
    assert whole(array) == slow_digest(array)


def slow_digest(array: Any) -> int:
    """Returns the digest by its definition, with one product for each word."""
    size = array.shape[-1] * array.itemsize
    rows = array.reshape(-1, array.shape[-1]).view(np.uint8)
    words = np.pad(rows, ((0, 0), (0, -size % 8))).view(np.uint64).astype(object)
    shape = (*array.shape[:-1], words.shape[1])
    keys: Any = 1
    for dim, length in enumerate(reversed(shape)):
        numbers = hashes._keys(dim, 0, length).astype(object)
        keys = numbers.reshape(-1, *[1] * dim) * keys % 2**64
    values = words + hashes._FOLD * (words // 2**32)
    return int((values.reshape(shape) * keys).sum()) % 2**64


@VERSIONS
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_changes_the_digest(version: int, dtype: str) -> None:
    array = random_array((4, 5), dtype)
    before = whole(array, version)
    seen = {before}
    for place in range(array.nbytes):
        changed = array.copy()
        changed.reshape(-1).view(np.uint8)[place] ^= 1
        seen.add(whole(changed, version))
    assert len(seen) == array.nbytes + 1


@VERSIONS
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_changed_signs_do_not_cancel_out(version: int, dtype: str) -> None:
    array = np.zeros((8, 8), dtype)
    seen = {whole(array, version)}
    places = list(itertools.combinations(itertools.product(range(8), range(8)), 2))
    for first, second in places:
        changed = array.copy()
        changed[first], changed[second] = -0.0, -0.0
        seen.add(whole(changed, version))
    assert len(seen) == len(places) + 1


@VERSIONS
def test_elements_that_change_places_change_the_digest(version: int) -> None:
    array = np.arange(36.0).reshape(6, 6)
    orders = [
        array,
        array[::-1],
        array[:, ::-1],
        array.T,
        np.roll(array, 1),
        np.roll(array, 1, 0),
        np.roll(array, 1, 1),
    ]
    assert len({whole(order, version) for order in orders}) == len(orders)


@VERSIONS
def test_zeros_of_either_sign_and_nans_have_different_digests(version: int) -> None:
    values = np.array([0x00000000, 0x80000000, 0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    assert len({whole(values[index : index + 1], version) for index in range(4)}) == 4


@VERSIONS
def test_unused_bits_do_not_change_the_digest(version: int) -> None:
    low = np.array([1, 7], np.uint8)
    assert whole(low.view(jnp.dtype("int4")), version) == whole((low | 0x50).view(jnp.dtype("int4")), version)


def test_digests_stay_what_they_are_in_files() -> None:
    array = np.arange(120, dtype=np.float32).reshape(4, 30)
    assert {version: digests.to_text(whole(array, version)) for version in (1, 2)} == {
        1: "41a30e9a11186282",
        2: "1af3a42349880000",
    }


def test_folds_of_parts_add_up_to_the_fold_of_wholes() -> None:
    parts = {"a": [3, 5], "b": [1 << 63, 1 << 63 | 7]}
    halves = [digests.fold((name, values[half]) for name, values in parts.items()) for half in (0, 1)]
    assert digests.add(halves) == digests.fold((name, digests.add(values)) for name, values in parts.items())


def test_leaves_that_change_places_change_the_fold() -> None:
    assert digests.fold([("a", 1), ("b", 2)]) != digests.fold([("a", 2), ("b", 1)])


def test_a_digest_survives_its_text() -> None:
    assert digests.from_text(digests.to_text(0xDEADBEEF)) == 0xDEADBEEF
