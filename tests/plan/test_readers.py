"""What a late reader leaves is read by others, exactly once, and shares follow the rates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_ext.options import Options
from orbax_ext.plan import Group, LaneBatch, Leaf, MeshInfo, RestorePlan, readers
from orbax_ext.plan.planner import make_plan
from tests.support.arriving import Arriving

pytestmark = pytest.mark.once

KIB = 1 << 10
MESHES = (
    MeshInfo(("dp", "tp"), (4, 2), tuple(number // 2 for number in range(8))),  # each process is a replica
    MeshInfo(("dp", "ep", "tp"), (2, 2, 2), tuple(number // 2 for number in range(8))),  # two replica axes
    MeshInfo(("dp", "tp"), (2, 4), tuple(number // 2 for number in range(8))),  # two processes make a replica
    MeshInfo(("dp", "tp"), (4, 2), tuple(number // 4 for number in range(8))),  # a process has two replicas
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[RestorePlan, MeshInfo]:
    mesh = draw(st.sampled_from(MESHES))
    leaves = []
    for number in range(draw(st.integers(1, 12))):
        block = tuple(draw(st.sampled_from([1, 4, 8, 64, 512])) for _ in range(draw(st.integers(1, 2))))
        sharded = draw(st.booleans())
        shape = (block[0] * mesh.sizes["tp"] if sharded else block[0], *block[1:])
        chunk = tuple(draw(st.sampled_from([size, max(1, size // 8), max(1, size // 3)])) for size in block)
        spec = (("tp",) if sharded else (), *[()] * (len(block) - 1))
        divisible = draw(st.booleans())
        leaves.append(Leaf(f"{number}", shape, "float32", 4, block, 0, spec, chunk, divisible))
    options = Options(strategy=draw(st.sampled_from(["spread", "single"])))
    most = draw(st.sampled_from([16 * KIB, 256 * KIB, 4096 * KIB]))
    return make_plan(leaves, [mesh], options, processes=max(mesh.processes) + 1, group_bytes=most), mesh


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_what_absent_replicas_leave_is_filled_in_several_rounds(
    made: tuple[RestorePlan, MeshInfo], data: st.DataObject
) -> None:
    plan, mesh = made
    leaves, arriving = plan.leaves, Arriving(mesh)
    for group in plan.groups:
        replicas = mesh.replicas(group.axes)
        reading: Group | None = group
        for _ in range(3):
            if reading is None:
                break
            absent = data.draw(st.sets(st.integers(0, replicas - 1), max_size=replicas - 1))
            holes = readers.without(reading, absent, leaves, {axis: mesh.sizes[axis] for axis in group.axes})
            leaves = holes.leaves
            arriving.exchange(holes.group, leaves)
            rates = [0.0 if replica in absent else 1.0 + replica for replica in range(replicas)]
            reading = (
                readers.dealt(group, holes.missing, leaves, rates, plan.strategy == "single") if holes.missing else None
            )
            if reading is not None:
                assert not {b.reader for b in reading.bundles} & absent
        if reading is not None:
            arriving.exchange(reading, leaves)
    assert set(plan.sources(plan.groups)) == set(arriving.blocks)
    for index, block in arriving.blocks.items():
        assert block.all(), f"{plan.leaves[index]} has holes"


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_shares_by_rates_hold_everything(made: tuple[RestorePlan, MeshInfo], data: st.DataObject) -> None:
    plan, mesh = made
    processes = max(mesh.processes) + 1
    rates = {process: data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.3])) for process in range(processes)}
    groups, leaves = readers.redealt(plan.groups, plan.leaves, [mesh], rates, plan.strategy == "single")
    arriving = Arriving(mesh)
    for place, group in enumerate(groups):
        arriving.exchange(group, leaves)
        by_replica = readers.replica_rates(group, [mesh], rates)
        for index, slices in group.later:
            assert index in group.leaves
            assert set(slices) <= {leaf for later in groups[place:] for leaf in later.leaves}
        if any(by_replica):
            for replica, rate in enumerate(by_replica):
                assert rate or not arriving.read[group.axes, replica]
    assert set(plan.sources(plan.groups)) == set(arriving.blocks)
    for index, block in arriving.blocks.items():
        assert block.all(), f"{plan.leaves[index]} has holes"


MIB = 1 << 20
DENSE = [Leaf(f"{n}", (2048, 1024), "float32", 4, (1024, 1024), 0, (("tp",), ()), (64, 1024), True) for n in range(64)]


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ((1.0, 1.0, 1.0, 0.1), (1, 1, 1, 0.1)),
        ((1.0, 0.5, 1.0, 1.0), (1, 0.5, 1, 1)),
        ((2.0, 0.0, 1.0, 1.0), (2, 0, 1, 1)),
    ],
)
def test_a_slow_host_reads_by_its_rate(rates: tuple[float, ...], shares: tuple[float, ...]) -> None:
    mesh = MESHES[0]
    plan = make_plan(DENSE, [mesh], Options(strategy="spread"), processes=4, group_bytes=32 * MIB)
    groups, leaves = readers.redealt(plan.groups, plan.leaves, [mesh], dict(enumerate(rates)), False)
    arriving = Arriving(mesh)
    for group in groups:
        arriving.exchange(group, leaves)
    read = np.array([arriving.read[("dp",), replica] for replica in range(4)])
    assert read.sum() == sum(leaf.block_bytes for leaf in DENSE)
    expected = read.sum() * np.array(shares) / sum(shares)
    assert np.all(read <= expected * 1.15 + MIB)
    assert max(read / np.maximum(rates, 0.1)) <= 1.2 * read.sum() / sum(rates)


def test_nothing_is_left_of_slices_where_a_batch_is_dealt_whole() -> None:
    mesh = MESHES[1]  # chunks allow to cut along one replica axis; the other one has a leaf in each lane
    leaves = [
        Leaf(f"{n}", (1024, 512), "float32", 4, (512, 512), 0, (("tp",), ()), (256, 512), divisible=n == 0)
        for n in range(2)
    ]
    plan = make_plan(leaves, [mesh], Options(), processes=4, group_bytes=4 * MIB)
    ((bundle,),) = (group.bundles for group in plan.groups)
    assert isinstance(bundle, LaneBatch)
    groups, left = readers.redealt(plan.groups, plan.leaves, [mesh], {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}, False)
    assert sorted(index for group in groups for index in group.leaves) == [0, 1]
    assert left == tuple(leaves)


def test_equal_rates_change_nothing() -> None:
    mesh = MESHES[0]
    plan = make_plan(DENSE, [mesh], Options(strategy="spread"), processes=4, group_bytes=32 * MIB)
    groups, leaves = readers.redealt(plan.groups, plan.leaves, [mesh], dict.fromkeys(range(4), 3.0), False)
    assert groups == plan.groups
    assert leaves == plan.leaves


def test_only_a_slow_reader_is_replaced_with_single() -> None:
    mesh = MESHES[0]
    plan = make_plan(DENSE, [mesh], Options(strategy="single"), processes=4, group_bytes=32 * MIB)
    for rate, reader in ((1.0, 0), (0.9, 0), (0.1, 1), (0.0, 1)):
        groups, _ = readers.redealt(plan.groups, plan.leaves, [mesh], {0: rate, 1: 1.0, 2: 1.0, 3: 1.0}, True)
        assert {bundle.reader for group in groups for bundle in group.bundles} == {reader}


def test_a_replica_is_as_fast_as_its_slowest_process() -> None:
    plan = make_plan(DENSE, [MESHES[2]], Options(strategy="spread"), processes=4, group_bytes=32 * MIB)
    assert readers.replica_rates(plan.groups[0], MESHES[2:3], {0: 2.0, 1: 1.0, 2: 3.0, 3: 3.0}) == (1.0, 3.0)
    assert readers.replicas_with(plan.groups[0], MESHES[2:3], [1]) == {0}
    assert list(itertools.chain.from_iterable(MESHES[2].owners(("dp",)))) == [0, 0, 1, 1, 2, 2, 3, 3]
