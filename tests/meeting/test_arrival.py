from __future__ import annotations

import pytest

from orbax_ext.meeting import arrival
from orbax_ext.plan import Leaf, MeshInfo

pytestmark = pytest.mark.once

MESH = MeshInfo(("dp", "tp"), (2, 4), (0,) * 4 + (1,) * 4)
TREE = {"a": "float32[8]", "b": "int8[2]", "c": "bool[1]"}


def test_equal_trees_have_no_differences() -> None:
    assert arrival.compare(TREE, TREE) == []


def test_each_kind_of_difference_is_told() -> None:
    mine = {"a": "float32[9]", "c": "bool[1]", "d": "int8[3]"}
    assert arrival.compare(mine, TREE) == [
        "has 'a' as float32[9], not float32[8]",
        "lacks 'b'",
        "has 'd', which process 0 lacks",
    ]


def test_another_order_is_a_difference() -> None:
    assert arrival.compare(dict(reversed(TREE.items())), TREE) == ["has the same leaves in another order"]


def test_only_the_first_few_are_told() -> None:
    assert arrival.compare({}, TREE, most=1) == ["lacks 'a'", "and 2 more differences"]


def test_a_tree_that_is_too_long_to_show_is_not_called_lacking() -> None:
    assert arrival.compare(TREE, {"a": TREE["a"]}) == ["differs in leaves that are not shown here"]


def test_a_leaf_is_described_by_all_that_must_agree() -> None:
    leaves = [
        Leaf("a", (8, 2), "float32", 16, mesh=0, spec=(("tp",), ())),
        Leaf("k", (), "key", 0, direct_because="it is a key"),
    ]
    assert arrival.describe(leaves, [MESH]) == {
        "a": "float32[8, 2] sharded (tp, -) on mesh (dp=2, tp=4)",
        "k": "key[] (it is a key)",
    }
