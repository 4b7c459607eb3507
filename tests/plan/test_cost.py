from __future__ import annotations

import dataclasses

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Costs, Leaf, Load, MeshInfo, Rates, RestorePlan, make_plan
from orbax_ext.plan.cost import PER_ARRAY, PER_GROUP, START

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


def test_the_cost_of_a_host_stays_the_same_as_hosts_grow_with_the_state() -> None:
    found = []
    for hosts in (64, 512, 4096):
        mesh = MeshInfo(("dp", "fsdp"), (2, hosts * 4), tuple(device // 8 for device in range(hosts * 8)))
        leaf = Leaf("w", (hosts * 4 * 64, 4096), "bfloat16", 2, (64, 4096), 0, (("fsdp",), ()), (32, 4096))
        made = make_plan([leaf] * 100, [mesh], Options(strategy="spread"), processes=hosts, group_bytes=16 * MIB)
        found.append(dataclasses.replace(Costs(made.leaves, [mesh], hosts).travelling(made.groups), read_by_all=0))
    assert found[0] == found[1] == found[2]
