from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from orbax_ext.plan import Leaf, Slice, piece_shape
from orbax_ext.plan.cutting import lane_count, slices, split

pytestmark = pytest.mark.once

LEAF = Leaf("w", (512, 64), "int8", 1, (256, 64), 0, (("tp",), ()), chunk=(32, 64), divisible=True)


@pytest.mark.parametrize(
    ("chunk", "assigned"),
    [
        ((1, 64), {"dp": 0, "fsdp": 0}),
        ((64, 1), {"dp": 1, "fsdp": 1}),
        ((64, 32), {"dp": 0, "fsdp": 1}),
        ((256, 64), {}),
        ((3, 64), {}),
        (None, {}),
        ((64,), {}),
    ],
    ids=["rows", "columns", "both", "one chunk", "chunks that do not fit", "unknown", "another rank"],
)
def test_axes_cut_a_block_only_where_chunks_end(chunk: tuple[int, ...] | None, assigned: dict[str, int]) -> None:
    assert split((256, 64), chunk, {"dp": 4, "fsdp": 2}) == assigned


def test_a_piece_is_what_the_axes_leave_of_a_block() -> None:
    axes = {"dp": 4, "fsdp": 2}
    assert piece_shape((256, 64), {"dp": 0, "fsdp": 1}, axes) == (64, 32)
    assert piece_shape((256, 64), {}, axes) == (256, 64)


def test_axes_that_cut_nothing_are_lanes() -> None:
    assert lane_count(LEAF, {"dp": 8}) == 1
    assert lane_count(LEAF, {"dp": 3, "fsdp": 2}) == 3


def test_a_leaf_is_cut_into_the_fewest_slices_that_fit() -> None:
    cut = slices(LEAF, 5, {}, 64 * 64)
    assert [leaf.slice for leaf in cut] == [Slice(5, 0, start, 64) for start in (0, 64, 128, 192)]
    assert {(leaf.shape, leaf.block) for leaf in cut} == {
        ((128, 64), (64, 64))
    }  # two devices' rows, one after the other


def test_a_leaf_is_cut_to_single_chunks_where_no_slice_fits() -> None:
    assert len(slices(LEAF, 0, {}, 1)) == 8


@pytest.mark.parametrize(
    "changes", [{"divisible": False}, {"chunk": None}, {"chunk": (256, 64)}, {"chunk": (3, 64)}, {}], ids=str
)
def test_a_leaf_that_is_small_or_cannot_be_cut_has_no_slices(changes: dict[str, Any]) -> None:
    most = 1 if changes else LEAF.block_bytes
    assert slices(dataclasses.replace(LEAF, **changes), 0, {}, most) == []


def test_slices_come_in_whole_batches_of_lanes() -> None:
    """Three replicas read a slice each. Eight chunks make no number of slices that three divides."""
    assert slices(LEAF, 0, {"dp": 3}, 64 * 64) == []
