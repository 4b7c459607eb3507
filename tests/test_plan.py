from __future__ import annotations

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, make_plan

MESH = MeshInfo(("pp", "dp", "tp"), (1, 4, 8), tuple(device // 8 for device in range(32)))
MIB = 1 << 20
Spec = tuple[tuple[str, ...], ...]


def leaf(name: str, spec: Spec = ((), ()), size: int = MIB, mesh: int | None = 0) -> Leaf:
    return Leaf(name, (8, 8), "float32", size, mesh=mesh, spec=spec)


def plan(*leaves: Leaf, budget: int = 4 * MIB, processes: int = 4, mesh: MeshInfo = MESH, **knobs: object):  # type: ignore[no-untyped-def]
    return make_plan(leaves, [mesh], Options(**knobs), processes=processes, budget=budget)  # type: ignore[arg-type]


def test_leaves_that_no_replica_axis_shards_travel_together() -> None:
    made = plan(leaf("a", (("tp",), ())), leaf("b"), replica_axis="dp")
    assert [group.leaves for group in made.groups] == [(0, 1)]
    assert made.groups[0].axes == ("dp",)
    assert not made.direct


def test_groups_hold_the_budget() -> None:
    made = plan(*[leaf(str(number)) for number in range(10)], replica_axis="dp")
    assert [len(group.leaves) for group in made.groups] == [4, 4, 2]
    assert all(group.device_bytes <= 4 * MIB for group in made.groups)


def test_a_leaf_above_the_budget_travels_alone() -> None:
    made = plan(leaf("a"), leaf("big", size=9 * MIB), leaf("b"), replica_axis="dp")
    assert [group.leaves for group in made.groups] == [(0,), (1,), (2,)]


def test_axes_that_are_not_named_are_those_that_no_leaf_uses() -> None:
    assert plan(leaf("a", (("tp",), ())), leaf("b")).groups[0].axes == ("dp",)
    assert plan(leaf("a"), leaf("b")).groups[0].axes == ("dp", "tp")


@pytest.mark.parametrize(
    ("spec", "knobs", "reason"),
    [
        ((("dp",), ()), {"replica_axis": "dp"}, "sharded on the replica axis 'dp'"),
        ((("tp", "dp"), ()), {"replica_axis": "dp"}, "sharded on the replica axis 'dp'"),
        (((), ()), {"replica_axis": "pp"}, "only one replica"),
        (((), ()), {"strategy": "direct"}, "strategy is 'direct'"),
        (((), ()), {"processes": 1}, "only one process"),
        (((), ()), {"processes": 5}, "does not span all processes"),
    ],
)
def test_what_cannot_be_broadcast_says_why(
    spec: tuple[tuple[str, ...], ...], knobs: dict[str, object], reason: str
) -> None:
    made = plan(leaf("a", spec), **knobs)  # type: ignore[arg-type]
    assert not made.groups
    assert reason in made.direct[0]


def test_a_negative_index_counts_from_the_last_axis() -> None:
    assert plan(leaf("a"), replica_axis=-1).groups[0].axes == ("tp",)


@pytest.mark.parametrize("axis", ["data", 3, -4])
def test_an_axis_that_is_not_there_is_refused(axis: str | int) -> None:
    with pytest.raises(ValueError, match="is not an axis of the mesh"):
        plan(leaf("a"), replica_axis=axis)


def test_leaves_of_different_meshes_travel_apart() -> None:
    other = MeshInfo(("x",), (32,), MESH.processes)
    made = make_plan([leaf("a"), leaf("b", mesh=1)], [MESH, other], Options(), processes=4, budget=MIB)
    assert [(group.mesh, group.axes) for group in made.groups] == [(0, ("dp", "tp")), (1, ("x",))]
