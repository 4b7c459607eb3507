from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from orbax_ext.placement import pieces


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (np.zeros(2), True),
        (np.float32(1), True),
        (np.zeros(2, jax.numpy.bfloat16), True),
        (np.zeros(2, bool), True),
        (np.array(["a"]), False),
        (np.array([None, 1], object), False),
        (np.array(["2020-01-01"], "datetime64[D]"), False),
        (3, False),
        (None, False),
    ],
    ids=repr,
)
def test_an_array_has_a_dtype_that_jax_supports(leaf: Any, expected: bool) -> None:
    assert pieces.is_array(leaf) is expected


@pytest.mark.parametrize(
    "array", [np.arange(24).reshape(4, 6), np.arange(24).reshape(4, 6).T, np.zeros((0, 3)), np.ones(())]
)
def test_chunks_are_the_bytes_of_an_array_in_order(array: np.ndarray) -> None:
    assert b"".join(pieces.host_chunks(array, chunk_bytes=100)) == array.tobytes()


def test_leaves_are_named_by_their_path() -> None:
    assert [name for name, _ in pieces.named_leaves({"a": [1, 2], "b": {"c": 3}})] == ["a/0", "a/1", "b/c"]
    assert pieces.named_leaves(7) == [("(the whole tree)", 7)]


def test_lists_are_mapped_in_the_order_of_the_leaves() -> None:
    mapped = pieces.map_named(lambda name, leaf, other: (name, leaf + other), {"b": 1, "a": 2}, [10, 20])
    assert mapped == {"a": ("a", 12), "b": ("b", 21)}
