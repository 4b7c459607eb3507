from __future__ import annotations

import pytest

from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.storage.checkpoint import digests
from orbax_ext.transfer import comparison

pytestmark = pytest.mark.once

MESH = MeshInfo(("dp", "tp"), (2, 4), (0,) * 4 + (1,) * 4)


def test_leaves_with_the_same_layout_are_compared_together() -> None:
    leaves = [
        Leaf("a", (8, 2), "float32", 16, mesh=0, spec=(("tp",), ())),
        Leaf("b", (8,), "float32", 8, mesh=0, spec=(("tp",),)),
        Leaf("c", (2, 8), "float32", 16, mesh=0, spec=((), ("tp",))),
        Leaf("d", (4,), "float32", 16, mesh=0, spec=((),)),
    ]
    assert comparison.leaf_sets(leaves, [0, 1, 2, 3], frozenset()) == [(0, 1), (2,), (3,)]
    assert comparison.leaf_sets(leaves, [0, 1], frozenset({1})) == [(0,), (1,)]


def test_a_set_is_cut_into_few_smaller_ones() -> None:
    parts = comparison.split(tuple(range(1000)))
    assert len(parts) <= comparison.MOST
    assert sum(parts, ()) == tuple(range(1000))
    assert comparison.split((4, 7)) == [(4,), (7,)]


def test_equal_replicas_have_no_mismatch() -> None:
    assert comparison.first_mismatch({0: {"0/0": ["a"]}, 1: {"0/0": ["a"]}}, {}) is None


def test_the_replica_that_differs_is_named() -> None:
    brought = {0: {"0/0": ["a"], "0/1": ["b"]}, 1: {"0/0": ["a"], "0/1": ["c"]}, 2: {"0/0": ["a"], "0/1": ["b"]}}
    wrong = comparison.first_mismatch(brought, {})
    assert wrong == comparison.Mismatch(0, 1, (1,), "c", "b", 0)


def test_two_devices_of_one_process_that_differ_are_found() -> None:
    wrong = comparison.first_mismatch({0: {"0/0": ["a", "x"]}, 1: {"0/0": ["a"]}}, {})
    assert wrong is not None
    assert wrong.processes == (0,)


def test_a_leaf_that_differs_from_its_stored_digest_is_found() -> None:
    brought = {process: {"0/0": [digests.to_text(3)], "0/1": [digests.to_text(4)]} for process in (0, 1)}
    assert comparison.first_mismatch(brought, {0: digests.to_text(7)}) is None
    wrong = comparison.first_mismatch(brought, {0: digests.to_text(8)})
    assert wrong is not None
    assert (wrong.part, wrong.processes) == (None, (0, 1))


def test_a_part_is_named_by_its_box() -> None:
    leaf = Leaf("a", (8, 6, 4), "float32", 0, mesh=0, spec=(("tp",), (), ("dp",)))
    number = comparison.part_number((4, 0, 2), (2, 6, 2), (8, 6, 4))
    assert comparison.box_text(leaf, [MESH], number) == "[4:6, :, 2:4]"
    assert comparison.box_text(leaf, [MESH], None) == "[:, :, :]"
