from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_ext.options import Options
from orbax_ext.plan import (
    Group,
    LaneBatch,
    Leaf,
    MeshInfo,
    Pack,
    RestorePlan,
    Slice,
    Sum,
    cutting,
    piece_shape,
    planner,
)
from orbax_ext.plan.planner import make_plan
from orbax_ext.plan.volumes import Loads

pytestmark = pytest.mark.once

MESH = MeshInfo(("pp", "dp", "tp"), (1, 4, 8), tuple(device // 8 for device in range(32)))
MIB = 1 << 20
Spec = tuple[tuple[str, ...], ...]


def leaf(name: str, spec: Spec = ((), ()), size: int = MIB, mesh: int | None = 0) -> Leaf:
    return Leaf(name, (8, size // 8), "int8", 1, (8, size // 8), mesh=mesh, spec=spec)


def plan(
    *leaves: Leaf, group_bytes: int = 4 * MIB, processes: int = 4, mesh: MeshInfo = MESH, **knobs: Any
) -> RestorePlan:
    options = Options(**{"strategy": "single", **knobs})
    return make_plan(leaves, [mesh], options, processes=processes, group_bytes=group_bytes)


def test_leaves_that_no_replica_axis_shards_travel_together() -> None:
    made = plan(leaf("a", (("tp",), ())), leaf("b"), replica_axis="dp")
    assert [group.leaves for group in made.groups] == [(0, 1)]
    assert made.groups[0].axes == ("dp",)
    assert not made.direct


def test_groups_keep_to_the_group_size() -> None:
    made = plan(*[leaf(str(number)) for number in range(10)], replica_axis="dp")
    assert [len(group.leaves) for group in made.groups] == [4, 4, 2]
    assert all(group.device_bytes <= 4 * MIB for group in made.groups)


def test_small_leaves_travel_in_one_vector_that_one_replica_reads() -> None:
    made = plan(*[leaf(str(number), size=1024) for number in range(100)], replica_axis="dp", primary_replica_id=2)
    (pack,) = made.groups[0].bundles
    assert isinstance(pack, Pack)
    assert pack.shares == ((), (), tuple(range(100)), ())
    assert pack.summed


def test_a_leaf_above_the_group_size_travels_alone() -> None:
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
        (((), ()), {"processes": 1, "strategy": "auto"}, "only one process"),
        ((("dp",), ()), {"strategy": "auto"}, "all its copies are on one process"),
        (((), ()), {"processes": 5}, "does not span all processes"),
    ],
)
def test_a_leaf_that_cannot_travel_has_a_reason(
    spec: tuple[tuple[str, ...], ...], knobs: dict[str, Any], reason: str
) -> None:
    made = plan(leaf("a", spec), **knobs)
    assert not made.groups
    assert reason in made.direct[0]


def test_a_negative_index_counts_from_the_last_axis() -> None:
    assert plan(leaf("a"), replica_axis=-1).groups[0].axes == ("tp",)


@pytest.mark.parametrize("axis", ["data", 3, -4])
def test_an_unknown_axis_is_refused(axis: str | int) -> None:
    with pytest.raises(ValueError, match="is not an axis of the mesh"):
        plan(leaf("a"), replica_axis=axis)


@pytest.mark.parametrize("axis", ["dp", -2])
def test_a_mesh_without_the_axis_uses_the_axes_that_nothing_is_sharded_over(axis: str | int) -> None:
    other = MeshInfo(("x", "y"), (4, 8), MESH.processes)
    flat = MeshInfo(("all",), (32,), MESH.processes)
    leaves = [leaf("a"), leaf("b", (("y",), ()), mesh=1), leaf("c", mesh=2)]
    options = Options(strategy="single", replica_axis=axis)
    made = make_plan(leaves, [MESH, other, flat], options, processes=4, group_bytes=MIB)
    replicas = [("dp",), ("x",), ("all",)]
    assert [group.axes for group in made.groups] == replicas
    assert not made.direct


@pytest.mark.parametrize("processes", [1, 4])
def test_a_mesh_of_one_process_needs_no_axis(processes: int) -> None:
    device, eight = MeshInfo(("x",), (1,), (0,)), MeshInfo(("x",), (8,), (0,) * 8)
    leaves = [leaf("a"), leaf("b", mesh=1)]
    options = Options(strategy="single", replica_axis="dp")
    assert not make_plan(leaves[:1], [device], options, processes=processes, group_bytes=MIB).groups
    made = make_plan(leaves, [device, eight], options, processes=processes, group_bytes=MIB)
    assert len(made.groups) == (processes == 1)


def test_an_axis_that_none_of_several_meshes_has_is_refused() -> None:
    meshes = [MeshInfo(("x",), (1,), (0,)), MeshInfo(("all",), (32,), MESH.processes)]
    options = Options(strategy="single", replica_axis=("all", "dp"))
    with pytest.raises(
        ValueError, match=r"axis 'dp' is not an axis of the meshes \(x=1\), \(all=32\). Give one of 'x',"
    ):
        make_plan([leaf("a", mesh=1)], meshes, options, processes=4, group_bytes=MIB)


def test_a_primary_replica_that_another_mesh_lacks_makes_direct_reads_there() -> None:
    other = MeshInfo(("x",), (32,), MESH.processes)
    two = MeshInfo(("x", "y"), (2, 16), MESH.processes)
    leaves = [leaf("a"), leaf("b", mesh=1), leaf("c", (("y",), ()), mesh=2)]
    options = Options(strategy="single", replica_axis="dp", primary_replica_id=3)
    made = make_plan(leaves, [MESH, other, two], options, processes=4, group_bytes=MIB)
    assert made.direct == {2: "its mesh (x=2, y=16) has no replica 3"}


def test_leaves_of_different_meshes_travel_apart() -> None:
    other = MeshInfo(("x",), (32,), MESH.processes)
    options = Options(strategy="single")
    made = make_plan([leaf("a"), leaf("b", mesh=1)], [MESH, other], options, processes=4, group_bytes=MIB)
    assert [(group.mesh, group.axes) for group in made.groups] == [(0, ("dp", "tp")), (1, ("x",))]


@pytest.mark.parametrize("strategy", ["single", "spread"])
def test_a_leaf_above_the_group_size_is_cut_along_its_chunks(strategy: str) -> None:
    big = Leaf("a", (4096, 1024), "int8", 1, (512, 1024), 0, (("tp",), ()), chunk=(32, 1024), divisible=True)
    knobs = {"replica_axis": "dp"} if strategy == "single" else {}
    made = make_plan([big], [MESH], Options(strategy=strategy, **knobs), processes=4, group_bytes=128 << 10)  # type: ignore[arg-type]
    assert [leaf.slice for leaf in made.leaves[1:]] == [Slice(0, 0, 128 * n, 128) for n in range(4)]
    assert {leaf.shape for leaf in made.leaves[1:]} == {(1024, 1024)}
    assert all(group.device_bytes == 128 << 10 for group in made.groups)


# All replicas read: strategy "spread".

LAYER = Leaf("w", (4096, 1024), "bfloat16", 2, (512, 1024), mesh=0, spec=(("tp",), ()))


def spread(leaves: Sequence[Leaf], mesh: MeshInfo = MESH, group_bytes: int = 64 * MIB) -> RestorePlan:
    return make_plan(leaves, [mesh], Options(strategy="spread"), processes=4, group_bytes=group_bytes)


def test_a_leaf_whose_chunks_allow_is_cut_among_its_replicas() -> None:
    (group,) = spread([dataclasses.replace(LAYER, chunk=(128, 1024))]).groups
    assert group.axes == ("dp",)
    assert group.bundles == (LaneBatch((0,), (("dp", 0),), ()),)


def test_leaves_in_whole_chunks_are_dealt_out_to_the_replicas() -> None:
    (group,) = spread([dataclasses.replace(LAYER, name=str(n), chunk=(512, 1024)) for n in range(8)]).groups
    assert group.bundles == (LaneBatch((0, 1, 2, 3), (), ("dp",)), LaneBatch((4, 5, 6, 7), (), ("dp",)))


def test_a_leaf_of_unknown_chunks_is_not_cut() -> None:
    (group,) = spread([LAYER] * 4).groups
    assert group.bundles == (LaneBatch((0, 1, 2, 3), (), ("dp",)),)


def test_a_large_leaf_that_is_like_no_other_is_read_by_one_replica() -> None:
    big = dataclasses.replace(LAYER, block=(4096, 1024), spec=((), ()))
    mesh = dataclasses.replace(MESH, axis_sizes=(1, 32, 1))
    (group,) = spread([big, big], mesh).groups
    assert group.bundles == (Sum(0, 0), Sum(1, 1))


def test_small_leaves_are_packed_and_dealt_out_by_bytes() -> None:
    sizes = [8, 800, 16, 400, 400, 8, 8, 800]
    leaves = [Leaf(str(n), (size,), "int8", 1, (size,), mesh=0, spec=(("tp",),)) for n, size in enumerate(sizes)]
    (group,) = spread(leaves).groups
    (pack,) = group.bundles
    assert isinstance(pack, Pack)
    assert sorted(pack.leaves) == list(range(8))
    loads = [sum(sizes[leaf] for leaf in share) for share in pack.shares]
    assert sorted(loads)[1:] == [816, 816, 808] or max(loads) <= 824
    assert pack.words * 4 >= max(loads)


def test_equal_small_leaves_are_dealt_out_in_runs_of_what_is_stored_side_by_side() -> None:
    leaves = [Leaf(str(n), (64,), "int8", 1, (64,), mesh=0, spec=(("tp",),)) for n in range(10)]
    (group,) = spread(leaves).groups
    (pack,) = group.bundles
    assert isinstance(pack, Pack)
    assert [share for share in pack.shares if share] == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]


def test_packs_of_equal_leaves_have_the_same_size() -> None:
    leaves = [Leaf(str(n), (64,), "int8", 1, (64,), mesh=0, spec=(("tp",),)) for n in range(96)]
    options = Options(strategy="spread", replica_axis="dp")
    made = make_plan(leaves, [MESH], options, processes=4, group_bytes=64 * 80)
    packs = [bundle for group in made.groups for bundle in group.bundles]
    assert [len(pack.leaves) for pack in packs] == [32, 32, 32]  # 40 fit into a pack
    assert len({(pack.words, pack.summed) for pack in packs if isinstance(pack, Pack)}) == 1


def test_leaves_that_use_other_axes_have_other_replicas() -> None:
    whole = dataclasses.replace(LAYER, block=(4096, 1024), spec=((), ()), chunk=(1, 1024))
    made = spread([dataclasses.replace(LAYER, chunk=(128, 1024)), whole])
    assert [group.axes for group in made.groups] == [("dp",), ("dp", "tp")]
    assert made.groups[1].bundles == (LaneBatch((1,), (("dp", 0), ("tp", 0)), ()),)


MESHES = st.sampled_from([(4, 2), (2, 2, 2), (8,), (1, 4, 8), (3, 2)])


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Leaf], MeshInfo]:
    sizes = draw(MESHES)
    names = ("a", "b", "c")[: len(sizes)]
    mesh = MeshInfo(names, sizes, tuple(n * 4 // math.prod(sizes) for n in range(math.prod(sizes))))
    leaves = []
    for number in range(draw(st.integers(1, 30))):
        used = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
        chunk = draw(st.sampled_from([(1, 64), (4, 64), (16, 16), (64, 1), (5, 7)]))
        counts = draw(st.tuples(st.integers(1, 24), st.integers(1, 24)))
        block = (chunk[0] * counts[0], chunk[1] * counts[1])
        spec = tuple((axis,) for axis in used) + ((),) * (2 - len(used))
        shape = tuple(
            size * math.prod(mesh.sizes[axis] for axis in axes) for size, axes in zip(block, spec, strict=True)
        )
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        known = draw(st.booleans())
        leaves.append(
            Leaf(str(number), shape, "x", itemsize, block, 0, spec, chunk if known else None, divisible=known)
        )
    return leaves, mesh


@given(trees(), st.integers(1 << 12, 1 << 24))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_element_is_read_exactly_once(tree: tuple[list[Leaf], MeshInfo], group_bytes: int) -> None:
    leaves, mesh = tree
    made = spread(leaves, mesh, group_bytes)
    assert list(made.leaves[: len(leaves)]) == leaves
    covered: Counter[int] = Counter()
    for group in made.groups:
        assert group.device_bytes == sum(made.leaves[index].block_bytes for index in group.leaves)
        for bundle in group.bundles:
            for reads in _reads(bundle, group, list(made.leaves), mesh):
                for index, count in reads.items():
                    covered[made.source(index)] += count
    for index, leaf in enumerate(leaves):
        assert (index in made.direct) != (covered[index] == math.prod(leaf.block))
    for index, slices in _slices(made.leaves).items():
        rows = [row for cut in slices for row in range(cut.start, cut.start + cut.size)]
        assert sorted(rows) == list(range(leaves[index].block[slices[0].dim]))


@given(trees(), st.integers(1 << 12, 1 << 24))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_group_sizes_hold_unless_chunks_forbid(tree: tuple[list[Leaf], MeshInfo], group_bytes: int) -> None:
    leaves, mesh = tree
    made = spread(leaves, mesh, group_bytes)
    for group in made.groups:
        if group.device_bytes > group_bytes:
            assert len(group.bundles) == 1
            (index,) = group.leaves
            leaf = made.leaves[index]
            assert leaf.slice is not None or not _could_be_cut(leaf, mesh.replicas(group.axes), group_bytes)


@given(trees(), st.integers(1 << 12, 1 << 24))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_replicas_read_the_same_number_of_bytes(tree: tuple[list[Leaf], MeshInfo], group_bytes: int) -> None:
    leaves, mesh = tree
    made = spread(leaves, mesh, group_bytes)
    loads: dict[tuple[str, ...], list[int]] = {}
    whole: dict[tuple[str, ...], int] = {}  # the largest that one replica reads alone
    for group in made.groups:
        load = loads.setdefault(group.axes, [0] * mesh.replicas(group.axes))
        for bundle in group.bundles:
            for row, reads in enumerate(_reads(bundle, group, list(made.leaves), mesh)):
                load[row] += sum(count * made.leaves[index].itemsize for index, count in reads.items())
            if not isinstance(bundle, LaneBatch):
                largest = max(made.leaves[index].block_bytes for index in bundle.leaves)
                whole[group.axes] = max(whole.get(group.axes, 0), largest)
    for axes, load in loads.items():
        assert max(load) <= 1.05 * sum(load) / len(load) + whole.get(axes, 0)


def _could_be_cut(leaf: Leaf, replicas: int, group_bytes: int) -> bool:
    """Whether slices one chunk thick, as many as there are replicas, fit into a group."""
    for dim, size in enumerate(leaf.block if leaf.chunk is not None else ()):
        thick = (leaf.chunk or ())[dim]
        chunks = size // thick
        if size % thick == 0 and chunks % replicas == 0 and leaf.block_bytes // chunks * replicas <= group_bytes:
            return True
    return False


def _slices(leaves: Sequence[Leaf]) -> dict[int, list[Slice]]:
    slices: dict[int, list[Slice]] = {}
    for leaf in leaves:
        if leaf.slice is not None:
            slices.setdefault(leaf.slice.leaf, []).append(leaf.slice)
    return slices


def _reads(bundle: object, group: Group, leaves: list[Leaf], mesh: MeshInfo) -> list[dict[int, int]]:
    """For each replica, how many elements of each leaf's block it reads; pieces must be whole chunks."""
    axes = {axis: mesh.sizes[axis] for axis in group.axes}
    found = []
    for place in itertools.product(*(range(size) for size in axes.values())):
        at = dict(zip(axes, place, strict=True))
        row = 0
        for axis in axes:
            row = row * axes[axis] + at[axis]
        if isinstance(bundle, Sum):
            found.append({bundle.leaf: math.prod(leaves[bundle.leaf].block)} if bundle.reader == row else {})
        elif isinstance(bundle, Pack):
            found.append({leaf: math.prod(leaves[leaf].block) for leaf in bundle.shares[row]})
        elif isinstance(bundle, LaneBatch):
            lane = 0
            for axis in bundle.lanes:
                lane = lane * axes[axis] + at[axis]
            leaf = leaves[bundle.leaves[lane]]
            piece = piece_shape(leaf.block, dict(bundle.splits), axes)
            for _, dim in bundle.splits:
                assert leaf.chunk is not None
                assert piece[dim] % leaf.chunk[dim] == 0
            found.append({bundle.leaves[lane]: math.prod(piece)})
    return found


def test_many_equal_leaves_are_balanced_and_share_programs() -> None:
    leaves = [dataclasses.replace(LAYER, name=str(n), chunk=(512, 1024)) for n in range(64)]
    made = spread(leaves, group_bytes=8 * MIB)
    assert len(made.groups) == 8
    assert len({tuple(type(bundle) for bundle in group.bundles) for group in made.groups}) == 1


def test_a_plan_for_a_very_large_job_is_made_in_modest_time() -> None:
    mesh = MeshInfo(("dp", "fsdp", "tp"), (64, 64, 8), tuple(device // 8 for device in range(32768)))
    leaf = Leaf("w", (16384, 4096), "bfloat16", 2, (256, 512), mesh=0, spec=(("fsdp",), ("tp",)), chunk=(4, 512))
    leaves = [dataclasses.replace(leaf, name=str(number)) for number in range(10_000)]
    made = make_plan(leaves, [mesh], Options(strategy="spread"), processes=4096, group_bytes=64 * MIB)
    assert sum(len(group.leaves) for group in made.groups) == 10_000
    loads = Loads(made.leaves, [mesh], 4096)
    assert loads.travelling(made.groups).read_by_all == sum(math.prod(leaf.shape) * 2 for leaf in leaves)


def test_equal_leaves_are_cut_once_to_find_the_largest_batch() -> None:
    one = Leaf("w", (8, 256), "float32", 4, (8, 256), 0, ((), ()), (8, 256))
    leaves = [dataclasses.replace(one, name=f"{number}") for number in range(1000)]
    mesh = MeshInfo(("dp",), (4,), (0, 1, 2, 3))
    with mock.patch.object(planner, "lane_count", wraps=cutting.lane_count) as counted:
        assert planner.largest_lane_batch(leaves, [mesh]) == 4 * one.block_bytes
    assert counted.call_count == 1
