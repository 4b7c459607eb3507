from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, RestorePlan, bytes_by_step, traffic_by_group, volumes
from orbax_ext.plan.boundary import bytes_of_groups
from orbax_ext.plan.planner import make_plan
from orbax_ext.plan.volumes import Load, Loads

pytestmark = pytest.mark.once

MIB = 1 << 20
# dp=4, tp=8 on 4 processes of 8 devices: each process is a replica.
MESH = MeshInfo(("dp", "tp"), (4, 8), tuple(process for process in range(4) for _ in range(8)))
# A replica spans two processes.
WIDE = MeshInfo(("dp", "tp"), (2, 8), tuple(process for process in range(4) for _ in range(4)))


def _leaf(name: str, shape: tuple[int, ...], spec: tuple[tuple[str, ...], ...] = (), mesh: MeshInfo = MESH) -> Leaf:
    spec = spec + ((),) * (len(shape) - len(spec))
    block = tuple(size // math.prod(mesh.sizes[a] for a in axes) for size, axes in zip(shape, spec, strict=True))
    return Leaf(name, shape, "uint8", 1, block, mesh=0, spec=spec, chunk=block)


def _plan(leaves: list[Leaf], mesh: MeshInfo, **options: Any) -> RestorePlan:
    return make_plan(leaves, [mesh], Options(**options), processes=4, group_bytes=64 * MIB)


# The traffic of one process.


def test_one_reader_sends_and_the_others_receive() -> None:
    plan = _plan([_leaf("w", (8, MIB), (("tp",),))], MESH, strategy="single", replica_axis="dp")
    (of_0,), (of_3,) = (traffic_by_group(plan, [MESH], process) for process in (0, 3))
    assert (of_0.brought, of_0.received, of_0.sent) == (8 * MIB, 0, 3 * 8 * MIB)
    assert (of_3.brought, of_3.received, of_3.sent) == (0, 8 * MIB, 0)


@pytest.mark.parametrize("mesh", [MESH, WIDE], ids=["a process is a replica", "a replica spans processes"])
@pytest.mark.parametrize("strategy", ["single", "spread"])
def test_every_byte_sent_is_received_and_every_process_gets_its_blocks(mesh: MeshInfo, strategy: str) -> None:
    leaves = [_leaf(f"w{number}", (8, 4 * MIB), (("tp",),), mesh) for number in range(4)]
    plan = _plan(leaves, mesh, strategy=strategy, replica_axis="dp")
    by_process = [traffic_by_group(plan, [mesh], process) for process in range(4)]
    for group in zip(*by_process, strict=True):
        assert sum(traffic.sent for traffic in group) == sum(traffic.received for traffic in group)
    held = sum(leaf.block_bytes for leaf in leaves) * mesh.processes.count(0)
    for groups in by_process:
        assert sum(traffic.brought + traffic.received for traffic in groups) == held


def test_small_leaves_are_read_as_they_are_and_travel_padded() -> None:
    leaves = [_leaf("a", (100,)), _leaf("b", (7,))]
    plan = _plan(leaves, MESH, strategy="spread")
    by_process = [traffic_by_group(plan, [MESH], process)[0] for process in range(4)]
    # Two of the 32 devices read one each; all the others' vectors are as long as the longer one, in words of 8 bytes.
    assert sorted(traffic.brought for traffic in by_process) == [0, 0, 0, 107]
    assert sum(traffic.sent for traffic in by_process) == sum(traffic.received for traffic in by_process)


def test_copies_on_one_process_do_not_count_as_received() -> None:
    one = MeshInfo(("dp",), (4,), (0, 0, 0, 0))
    leaves, options = [_leaf("w", (MIB,), (), one)], Options(strategy="single")
    plan = make_plan(leaves, [one], options, processes=1, group_bytes=64 * MIB)
    assert [(traffic.received, traffic.sent) for traffic in traffic_by_group(plan, [one], 0)] == [(0, 0)]


# What all processes read, step by step.


def test_leaves_that_travel_are_read_once_and_the_others_by_every_process() -> None:
    leaves = [_leaf("w", (8, 4 * MIB), (("tp",),)), Leaf("key", (2,), "uint32", direct_because="it is a key")]
    plan = _plan(leaves, MESH, strategy="spread")
    assert sum(bytes_by_step(plan, [MESH], 4).values()) == 32 * MIB + 4 * 2 * 4


@pytest.mark.parametrize(
    ("spec", "copies"), [((("tp",),), 4), ((("dp", "tp"),), 1), ((), 4)], ids=["on tp", "on all", "on none"]
)
def test_without_exchange_each_process_reads_the_blocks_that_it_holds(
    spec: tuple[tuple[str, ...], ...], copies: int
) -> None:
    plan = _plan([_leaf("w", (32, MIB), spec)], MESH, strategy="direct")
    assert bytes_by_step(plan, [MESH], 4) == {None: copies * 32 * MIB}


@pytest.mark.parametrize(("dtype", "itemsize"), [("None", 4), ("bfloat16", 2), ("float64", 8)])
def test_the_size_of_a_leaf_without_a_mesh_follows_from_its_dtype(dtype: str, itemsize: int) -> None:
    plan = _plan([Leaf("odd", (10,), dtype, direct_because="its shape or dtype is not known")], MESH)
    assert bytes_by_step(plan, [MESH], 4) == {None: 4 * 10 * itemsize}
    assert volumes.count(plan, [MESH], 4).read.tolist() == [10 * itemsize] * 4


# Loads, for the cost model.

SMALL_MESH = MeshInfo(("dp", "tp"), (4, 2), (0, 0, 1, 1, 2, 2, 3, 3))
LEAVES = [
    Leaf(f"w{n}", (2048, 4096), "bfloat16", 2, (1024, 4096), 0, (("tp",), ()), chunk=(256, 4096), divisible=True)
    for n in range(64)
]  # 1 GiB


def load(strategy: Any, mesh: MeshInfo = SMALL_MESH) -> Load:
    options = Options(strategy=strategy, replica_axis="dp" if strategy == "single" else None)
    plan = make_plan(LEAVES, [mesh], options, processes=4, group_bytes=16 * MIB)
    return Loads(plan.leaves, [mesh], 4).travelling(plan.groups)


def test_spread_reads_every_byte_once_and_receives_the_rest() -> None:
    spread = load("spread")
    assert spread.read == 256 * MIB
    assert spread.read_by_all == 1024 * MIB
    assert spread.link == 768 * MIB


def test_in_single_one_process_reads_and_a_sum_goes_around_twice() -> None:
    single = load("single")
    assert single.read == single.read_by_all == 1024 * MIB
    assert single.link == 2 * 768 * MIB


def test_a_sum_takes_no_link_where_all_copies_are_on_one_process() -> None:
    inside = MeshInfo(("tp", "dp"), (2, 4), (0, 0, 0, 0, 1, 1, 1, 1))
    options = Options(strategy="single", replica_axis="dp")
    plan = make_plan(LEAVES, [inside], options, processes=2, group_bytes=16 * MIB)
    assert Loads(plan.leaves, [inside], 2).travelling(plan.groups).link == 0


def test_directly_every_process_reads_the_blocks_that_it_holds() -> None:
    direct = Loads(LEAVES, [SMALL_MESH], 4).direct(range(64))
    assert direct == Load(read=1024 * MIB, read_by_all=4096 * MIB, arrays=64, groups=0)


def test_a_block_that_several_devices_of_a_process_hold_is_read_once() -> None:
    whole = [Leaf("a", (1024,), "int8", 1, (1024,), 0, ((),))]
    assert Loads(whole, [SMALL_MESH], 4).direct([0]).read == 1024


def test_the_load_of_a_host_stays_the_same_as_hosts_grow_with_the_state() -> None:
    loads = []
    for hosts in (64, 512, 4096):
        mesh = MeshInfo(("dp", "fsdp"), (2, hosts * 4), tuple(device // 8 for device in range(hosts * 8)))
        leaf = Leaf("w", (hosts * 4 * 64, 4096), "bfloat16", 2, (64, 4096), 0, (("fsdp",), ()), (32, 4096))
        plan = make_plan([leaf] * 100, [mesh], Options(strategy="spread"), processes=hosts, group_bytes=16 * MIB)
        loads.append(dataclasses.replace(Loads(plan.leaves, [mesh], hosts).travelling(plan.groups), read_by_all=0))
    assert loads[0] == loads[1] == loads[2]


def test_one_process_holds_its_own_blocks() -> None:
    uneven = MeshInfo(("dp", "tp"), (3, 2), (0, 0, 1, 1, 2, 3))
    half = dataclasses.replace(LEAVES[0], shape=(2, 512), block=(1, 512), dtype="uint8", itemsize=1, spec=(("tp",), ()))
    loads = Loads([half, half], [uneven], 4)
    assert [loads.held([0, 1], process) for process in range(4)] == [2048, 2048, 1024, 1024]


def calls_of_block_bytes(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how often the bytes of a block are worked out to plan a restore and count the bytes of its groups."""
    leaves = [_leaf(f"w{number}", (8, MIB), (("tp",),)) for number in range(layers)]
    counted = 0
    block_bytes: Any = vars(Leaf)["block_bytes"]

    def count(leaf: Leaf) -> int:
        nonlocal counted
        counted += 1
        return int(block_bytes.func(leaf))

    with monkeypatch.context() as patched:
        patched.setattr(Leaf, "block_bytes", property(count))
        plan = make_plan(leaves, [MESH], Options(replica_axis="dp"), processes=4, group_bytes=64 * MIB)
        assert len(plan.groups) == layers // 64
        bytes_of_groups(plan, [MESH], 4)
    return counted


def test_the_bytes_of_groups_are_counted_in_proportion_to_the_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (calls_of_block_bytes(layers, monkeypatch) for layers in (1024, 4096))
    assert many == 4 * few
