from __future__ import annotations

from typing import Any

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, Rates, RestorePlan, anything_travels, choose_plan, with_cheapest
from orbax_ext.plan.planner import make_plan

pytestmark = pytest.mark.once

MIB = 1 << 20
MESH = MeshInfo(("dp", "tp"), (4, 2), (0, 0, 1, 1, 2, 2, 3, 3))
LEAVES = [
    Leaf(f"w{n}", (2048, 4096), "bfloat16", 2, (1024, 4096), 0, (("tp",), ()), chunk=(256, 4096), divisible=True)
    for n in range(64)
]  # 1 GiB


def plan(strategy: str, leaves: list[Leaf] = LEAVES, mesh: MeshInfo = MESH, group_bytes: int = 16 * MIB) -> RestorePlan:
    knobs = {"replica_axis": "dp"} if strategy == "single" else {}
    return make_plan(leaves, [mesh], Options(strategy=strategy, **knobs), processes=4, group_bytes=group_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("storage", "fabric", "travels"), [(320, 1600, True), (1600, 320, False), (80, 400, True)])
def test_the_faster_strategy_is_chosen(storage: int, fabric: int, travels: bool) -> None:
    rates = Rates(storage * 1e6 / 8, fabric * 1e6 / 8)
    chosen = with_cheapest(plan("auto"), [MESH], 4, rates)
    assert bool(chosen.groups) == travels
    assert bool(chosen.direct) != travels
    reasons = [chosen.because] if travels else list(chosen.direct.values())
    assert all("s expected" in reason and "given" in reason for reason in reasons)


def test_exchanges_that_prove_slow_are_given_up() -> None:
    rates = Rates(50e6, 200e6, how="measured")
    made = plan("auto")
    assert len(made.groups) == 32
    assert len(with_cheapest(made, [MESH], 4, rates, done=4, pace=0.1).groups) == 32
    assert len(with_cheapest(made, [MESH], 4, rates, done=4, pace=5.0).groups) == 4


@pytest.mark.parametrize(("fabric", "kept"), [(10e6, 1), (1e6, 0)])
def test_a_group_that_has_been_read_travels_if_it_arrives_in_time(fabric: float, kept: int) -> None:
    chosen = with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, fabric), read=1)
    assert len(chosen.groups) == kept
    assert len(chosen.direct) == 64 - 2 * kept


def test_slices_of_a_leaf_that_was_read_in_part_travel_with_it() -> None:
    big = [Leaf(f"b{n}", (8192, 4096), "int8", 1, (4096, 4096), 0, (("tp",), ()), (64, 4096), True) for n in range(8)]
    chosen = with_cheapest(plan("auto", big, group_bytes=4 * MIB), [MESH], 4, Rates(1e6, 1e6), read=1)
    assert len(chosen.groups) == 4  # one leaf
    assert set(chosen.direct) == set(range(1, 8))


def test_a_leaf_that_has_begun_to_travel_continues() -> None:
    big = [Leaf(f"b{n}", (8192, 4096), "int8", 1, (4096, 4096), 0, (("tp",), ()), (64, 4096), True) for n in range(2)]
    made = plan("auto", big, group_bytes=4 * MIB)
    assert len(made.groups) == 8
    kept = with_cheapest(made, [MESH], 4, Rates(1e9, 1e6), done=1)
    assert len(kept.groups) == 4
    assert set(kept.direct) == {1}


@pytest.mark.parametrize(("fabric", "travels"), [(50e6, False), (80e6, False), (160e6, True)])
def test_measured_rates_that_may_be_of_one_link_choose_direct_reads(fabric: float, travels: bool) -> None:
    """Measured one after the other, two users of one link each see all of it."""
    assert bool(with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, fabric, how="measured")).groups) == travels
    assert with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, 80e6)).groups  # given, not measured


def test_a_group_that_has_been_read_does_not_travel_over_a_shared_link() -> None:
    assert not with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, 50e6, how="measured"), read=1).groups


def test_a_tiny_state_is_read_directly() -> None:
    small = [Leaf("a", (1024,), "int8", 1, (1024,), 0, ((),))]
    chosen = with_cheapest(plan("auto", small), [MESH], 4, None)
    assert not chosen.groups
    assert "too small" in chosen.direct[0]
    assert with_cheapest(plan("auto"), [MESH], 4, None).groups


SMALL = [Leaf("a", (1024,), "int8", 1, (1024,), 0, ((),))]


@pytest.mark.parametrize("strategy", ["spread", "single", "direct"])
def test_a_strategy_that_is_named_is_taken(strategy: Any) -> None:
    made = choose_plan(LEAVES, [MESH], Options(strategy=strategy), processes=4, group_bytes=16 * MIB)
    assert made == make_plan(LEAVES, [MESH], Options(strategy=strategy), processes=4, group_bytes=16 * MIB)


def test_auto_chooses_by_the_rates_in_the_options_unless_others_are_given() -> None:
    options = Options(storage_gbps=0.32, fabric_gbps=1.6)
    assert choose_plan(LEAVES, [MESH], options, processes=4, group_bytes=16 * MIB).groups
    slow_fabric = Rates(storage=1e10, fabric=1e6)
    chosen = choose_plan(LEAVES, [MESH], options, processes=4, group_bytes=16 * MIB, rates=slow_fabric)
    assert not chosen.groups


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


def test_with_rates_a_leaf_may_travel_even_if_a_plan_reads_it_directly() -> None:
    options = Options(storage_gbps=100, fabric_gbps=0.1)
    assert not choose_plan(LEAVES, [MESH], options, processes=4, group_bytes=16 * MIB).groups
    assert anything_travels(LEAVES, [MESH], options, processes=4)
