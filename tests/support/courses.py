"""A course whose plan has groups of all kinds: cut, read by one replica each, packed."""

from __future__ import annotations

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.plan.course import Course
from orbax_ext.plan.planner import make_plan

MESH = MeshInfo(("dp", "tp"), (4, 2), tuple(number // 2 for number in range(8)))
LEAVES = [
    *[Leaf(f"cut {n}", (1024, 512), "float32", 4, (512, 512), 0, (("tp",), ()), (32, 512), True) for n in range(6)],
    *[Leaf(f"lane {n}", (1024, 256), "float32", 4, (512, 256), 0, (("tp",), ())) for n in range(7)],
    *[Leaf(f"small {n}", (9,), "float32", 4, (9,), 0, ((),)) for n in range(9)],
]


def make_course(strategy: str) -> Course:
    """Returns a course of four processes that are a replica each."""
    plan = make_plan(LEAVES, [MESH], Options(strategy=strategy), processes=4, group_bytes=2 << 20)  # type: ignore[arg-type]
    return Course(plan, [MESH])
