from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from orbax_ext.placement import agree

HOSTS = {0: "a", 1: "b", 2: "c"}


def test_equal_arrays_have_equal_digests_whatever_their_layout() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert agree.digest_of_array(array) == agree.digest_of_array(np.asfortranarray(array))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2, np.float32), -np.zeros(2, np.float32)),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.array([0x7FC00000], np.uint32).view(np.float32), np.array([0x7FC00001], np.uint32).view(np.float32)),
    ],
    ids=["negative-zero", "dtype", "shape", "nan-payload"],
)
def test_arrays_that_differ_in_bits_dtype_or_shape_have_different_digests(one: np.ndarray, other: np.ndarray) -> None:
    assert agree.digest_of_array(one) != agree.digest_of_array(other)


def test_the_unused_bits_of_narrow_types_do_not_change_the_digest() -> None:
    clean = np.array([1, 2], np.int8).view(ml_dtypes.int4)
    dirty = np.array([1 | 0x70, 2 | 0x30], np.int8).view(ml_dtypes.int4)
    assert agree.digest_of_array(clean) == agree.digest_of_array(dirty)


def test_a_mismatch_names_the_process_that_differs_from_most() -> None:
    error = agree.mismatch("replicate", {0: [("w", "x")], 1: [("w", "y")], 2: [("w", "x")]}, HOSTS)
    assert error.leaves == {"w": (1,)}
    assert "leaf w: expected x (as on most processes, or the lowest)\n    process 1 (b): found y" in str(error)


def test_a_mismatch_between_two_processes_takes_the_lowest_as_expected() -> None:
    error = agree.mismatch("replicate", {1: [("w", "y")], 0: [("w", "x")]}, HOSTS)
    assert error.leaves == {"w": (1,)}


def test_a_mismatch_names_a_leaf_that_most_processes_do_not_have() -> None:
    missing = ("", "no such leaf")
    error = agree.mismatch("replicate", {0: [missing], 1: [("extra", "x")], 2: [missing]}, HOSTS)
    assert error.leaves == {"extra": (1,)}
    assert "leaf extra: expected no such leaf" in str(error)


def test_a_mismatch_names_another_leaf_found_in_the_same_place() -> None:
    error = agree.mismatch("shard", {0: [("a", "x")], 1: [("b", "x")], 2: [("a", "x")]}, {})
    assert "  process 1: found leaf b, x" in str(error)


def test_a_mismatch_lists_a_few_processes_and_counts_the_others() -> None:
    described = {process: [("w", "x" if process < 20 else "y")] for process in range(32)}
    error = agree.mismatch("replicate", described, {})
    assert str(error).count("found y") == 8
    assert "  and 4 more\n" in str(error)
    assert error.leaves == {"w": tuple(range(20, 32))}
