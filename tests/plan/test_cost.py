from __future__ import annotations

import dataclasses

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Costs, Leaf, Load, MeshInfo, Rates, RestorePlan, make_plan, with_cheapest
from orbax_ext.plan.cost import PER_ARRAY, PER_GROUP, START

pytestmark = pytest.mark.once

MIB = 1 << 20
MESH = MeshInfo(("dp", "tp"), (4, 2), (0, 0, 1, 1, 2, 2, 3, 3))
LEAVES = [
    Leaf(f"w{n}", (2048, 4096), "bfloat16", 2, (1024, 4096), 0, (("tp",), ()), chunk=(256, 4096), divisible=True)
    for n in range(64)
]  # 1 GiB


def plan(strategy: str, leaves: list[Leaf] = LEAVES, mesh: MeshInfo = MESH, budget: int = 16 * MIB) -> RestorePlan:
    knobs = {"replica_axis": "dp"} if strategy == "single" else {}
    return make_plan(leaves, [mesh], Options(strategy=strategy, **knobs), processes=4, budget=budget)  # type: ignore[arg-type]


def load(made: RestorePlan, mesh: MeshInfo = MESH) -> Load:
    return Costs(made.leaves, [mesh], 4).travelling(made.groups)


def test_spread_reads_every_byte_once_and_receives_the_rest() -> None:
    found = load(plan("spread"))
    assert found.read == 256 * MIB
    assert found.read_by_all == 1024 * MIB
    assert found.received == 768 * MIB


def test_in_single_one_process_reads_and_a_sum_goes_around_twice() -> None:
    found = load(plan("single"))
    assert found.read == found.read_by_all == 1024 * MIB
    assert found.received == 2 * 768 * MIB


def test_directly_every_process_reads_what_it_holds() -> None:
    found = Costs(LEAVES, [MESH], 4).direct(range(64))
    assert (found.read, found.read_by_all, found.reads, found.groups) == (1024 * MIB, 4096 * MIB, 64, 0)


def test_a_block_that_several_devices_of_a_process_hold_is_read_once() -> None:
    whole = [Leaf("a", (1024,), "int8", 1, (1024,), 0, ((),))]
    assert Costs(whole, [MESH], 4).direct([0]).read == 1024


def test_reading_and_exchanging_overlap() -> None:
    rates = Rates(storage=100.0, fabric=50.0)
    assert Load(read=1000, received=100, groups=10).seconds(rates) == pytest.approx(
        START + 10 + (2 + 10 * PER_GROUP) / 10
    )
    assert Load(read=100, received=1000, groups=10).seconds(rates) == pytest.approx(START + 20 + 10 * PER_GROUP + 0.1)
    assert Load(read=1000, read_by_all=4000, reads=8).seconds(rates) == pytest.approx(10 + 8 * PER_ARRAY)
    assert Load(read=1000, read_by_all=4000).seconds(Rates(100.0, 50.0, storage_total=200.0)) == pytest.approx(20)


@pytest.mark.parametrize(("storage", "fabric", "travels"), [(320, 1600, True), (1600, 320, False), (80, 400, True)])
def test_the_faster_way_is_taken(storage: int, fabric: int, travels: bool) -> None:
    rates = Rates(storage * 1e6 / 8, fabric * 1e6 / 8)
    chosen = with_cheapest(plan("auto"), [MESH], 4, rates)
    assert bool(chosen.groups) == travels
    assert bool(chosen.direct) != travels
    reasons = [chosen.because] if travels else list(chosen.direct.values())
    assert all("s expected" in reason and "given" in reason for reason in reasons)


def test_what_has_been_seen_to_be_slow_is_given_up() -> None:
    rates = Rates(50e6, 200e6, how="measured")
    made = plan("auto")
    assert len(made.groups) == 32
    assert len(with_cheapest(made, [MESH], 4, rates, done=4, pace=0.1).groups) == 32
    assert len(with_cheapest(made, [MESH], 4, rates, done=4, pace=5.0).groups) == 4


@pytest.mark.parametrize(("fabric", "kept"), [(10e6, 1), (1e6, 0)])
def test_what_has_been_read_travels_beside_the_others_if_it_arrives_in_time(fabric: float, kept: int) -> None:
    chosen = with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, fabric), read=1)
    assert len(chosen.groups) == kept
    assert len(chosen.direct) == 64 - 2 * kept


def test_slices_of_what_has_been_read_in_part_travel_with_it() -> None:
    big = [Leaf(f"b{n}", (8192, 4096), "int8", 1, (4096, 4096), 0, (("tp",), ()), (64, 4096), True) for n in range(8)]
    chosen = with_cheapest(plan("auto", big, budget=4 * MIB), [MESH], 4, Rates(1e6, 1e6), read=1)
    assert len(chosen.groups) == 4  # one leaf
    assert set(chosen.direct) == set(range(1, 8))


def test_a_leaf_that_has_begun_to_travel_goes_on() -> None:
    big = [Leaf(f"b{n}", (8192, 4096), "int8", 1, (4096, 4096), 0, (("tp",), ()), (64, 4096), True) for n in range(2)]
    made = plan("auto", big, budget=4 * MIB)
    assert len(made.groups) == 8
    kept = with_cheapest(made, [MESH], 4, Rates(1e9, 1e6), done=1)
    assert len(kept.groups) == 4
    assert set(kept.direct) == {1}


@pytest.mark.parametrize(("fabric", "travels"), [(50e6, False), (80e6, False), (160e6, True)])
def test_links_that_may_be_one_are_not_trusted_to_be_two(fabric: float, travels: bool) -> None:
    """A look at an idle link does not show that storage and fabric share it, unless they are clearly of other rates."""
    assert bool(with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, fabric, how="measured")).groups) == travels
    assert with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, 80e6)).groups  # who says so knows it


def test_what_shares_a_link_with_the_reads_is_read_again() -> None:
    assert not with_cheapest(plan("auto"), [MESH], 4, Rates(50e6, 50e6, how="measured"), read=1).groups


def test_a_tiny_state_is_read_directly() -> None:
    small = [Leaf("a", (1024,), "int8", 1, (1024,), 0, ((),))]
    chosen = with_cheapest(plan("auto", small), [MESH], 4, None)
    assert not chosen.groups
    assert "too small" in chosen.direct[0]
    assert with_cheapest(plan("auto"), [MESH], 4, None).groups


def test_the_cost_of_a_host_stays_the_same_as_hosts_grow_with_the_state() -> None:
    found = []
    for hosts in (64, 512, 4096):
        mesh = MeshInfo(("dp", "fsdp"), (2, hosts * 4), tuple(device // 8 for device in range(hosts * 8)))
        leaf = Leaf("w", (hosts * 4 * 64, 4096), "bfloat16", 2, (64, 4096), 0, (("fsdp",), ()), (32, 4096))
        made = make_plan([leaf] * 100, [mesh], Options(strategy="spread"), processes=hosts, budget=16 * MIB)
        found.append(dataclasses.replace(Costs(made.leaves, [mesh], hosts).travelling(made.groups), read_by_all=0))
    assert found[0] == found[1] == found[2]
