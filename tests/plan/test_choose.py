from __future__ import annotations

from typing import Any

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, anything_travels, choose_plan
from orbax_ext.plan.choose import is_tiny
from orbax_ext.plan.planner import make_plan
from orbax_ext.plan.volumes import Load

pytestmark = pytest.mark.once

MIB = 1 << 20
MESH = MeshInfo(("dp", "tp"), (4, 2), (0, 0, 1, 1, 2, 2, 3, 3))
LEAVES = [
    Leaf(f"w{n}", (2048, 4096), "bfloat16", 2, (1024, 4096), 0, (("tp",), ()), chunk=(256, 4096), divisible=True)
    for n in range(64)
]  # 1 GiB


SMALL = [Leaf("a", (1024,), "int8", 1, (1024,), 0, ((),))]


@pytest.mark.parametrize("strategy", ["spread", "single", "direct"])
def test_a_strategy_that_is_named_is_taken(strategy: Any) -> None:
    made = choose_plan(LEAVES, [MESH], Options(strategy=strategy), processes=4, group_bytes=16 * MIB)
    assert made == make_plan(LEAVES, [MESH], Options(strategy=strategy), processes=4, group_bytes=16 * MIB)


def test_auto_starts_with_all_groups_unless_the_state_is_tiny() -> None:
    made = choose_plan(LEAVES, [MESH], Options(), processes=4, group_bytes=16 * MIB)
    assert made == make_plan(LEAVES, [MESH], Options(strategy="spread"), processes=4, group_bytes=16 * MIB)
    tiny = choose_plan(SMALL, [MESH], Options(), processes=4, group_bytes=16 * MIB)
    assert not tiny.groups
    assert "too small" in tiny.direct[0]


@pytest.mark.parametrize(
    ("load", "tiny"), [(Load(), True), (Load(read=1 << 20), False), (Load(read=1, arrays=32), False)]
)
def test_a_load_is_tiny_if_it_has_few_bytes_in_few_arrays(load: Load, tiny: bool) -> None:
    assert is_tiny(load) == tiny


def test_a_divided_plan_reads_each_leaf_or_slice_of_the_back_directly() -> None:
    big = [Leaf(f"b{n}", (8192, 4096), "int8", 1, (4096, 4096), 0, (("tp",), ()), (64, 4096), True) for n in range(2)]
    made = make_plan(big, [MESH], Options(), processes=4, group_bytes=4 * MIB)
    assert len(made.groups) == 8
    divided = made.divided(range(3, 8))
    assert divided.groups == made.groups[:3]
    assert sorted(divided.direct) == sorted(index for group in made.groups[3:] for index in group.leaves)
    assert made.divided(()) == made


@pytest.mark.parametrize("group_bytes", [1, 4 * MIB, 256 * MIB])
@pytest.mark.parametrize("leaves", [LEAVES, SMALL, []], ids=["large", "tiny", "none"])
@pytest.mark.parametrize("knobs", [{}, {"strategy": "spread"}, {"strategy": "direct"}, {"strategy": "single"}], ids=str)
@pytest.mark.parametrize("processes", [4, 1])
def test_whether_anything_travels_is_known_without_a_memory_limit(
    processes: int, knobs: dict[str, Any], leaves: list[Leaf], group_bytes: int
) -> None:
    mesh = MESH if processes == 4 else MeshInfo(MESH.axis_names, MESH.axis_sizes, (0,) * 8)
    options = Options(**knobs)
    made = choose_plan(leaves, [mesh], options, processes=processes, group_bytes=group_bytes)
    assert anything_travels(leaves, [mesh], options, processes=processes) == bool(made.groups)
