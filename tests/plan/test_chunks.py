"""What every device reads and receives, counted one by one, is what `volumes.count` counts."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from orbax_ext.options import Options
from orbax_ext.plan import (
    ColumnSum,
    LaneBatch,
    Leaf,
    LeafBatch,
    MeshInfo,
    Pack,
    RestorePlan,
    Sum,
    traffic_by_group,
    volumes,
)
from orbax_ext.plan.forecast import described, notation
from orbax_ext.plan.planner import make_plan

pytestmark = pytest.mark.once

MESHES = {
    "a replica on each process": MeshInfo(("pp", "dp", "tp"), (1, 4, 4), tuple(i // 4 for i in range(16))),
    "replicas across processes": MeshInfo(("dp", "tp"), (2, 8), tuple(i // 4 for i in range(16))),
    "copies within a process": MeshInfo(("tp", "dp"), (4, 4), tuple(i // 4 for i in range(16))),
    "one device each": MeshInfo(("dp", "tp"), (4, 2), tuple(range(8))),
    "more replicas than leaves": MeshInfo(("dp", "tp"), (32, 2), tuple(i // 2 for i in range(64))),
    "processes in another order": MeshInfo(("dp", "tp"), (4, 2), (1, 1, 0, 0, 3, 3, 2, 2)),
}
SPECS = ["P()", "P(tp)", "P(None,tp)", "P(dp)", "P((dp,tp))", "P(dp,tp)"]


def some_leaves(mesh: MeshInfo) -> list[Leaf]:
    """Leaves of many kinds, small and large, with chunks that fit and chunks that do not."""
    chosen = random.Random(str(mesh))
    found = []
    for number, spec in enumerate(SPECS * 3):
        shape = (64 * chosen.choice([1, 16, 64]), 64 * chosen.choice([1, 8]))
        found.append(described.Described(f"leaf{number}", shape, "float32", notation.parse_spec(spec)))
    placed = described.place(found, mesh, [])[0]
    chunks = [[chosen.choice([block, max(1, block // 4), 48, 64]) for block in leaf.block] for leaf in placed]
    with_chunks = zip(found, placed, chunks, strict=True)
    again = [
        described.Described(each.name, each.shape, each.dtype, each.spec, tuple(map(min, chunk, leaf.shape)))
        for each, leaf, chunk in with_chunks
    ]
    return described.place(again, mesh, [])[0]


@pytest.mark.parametrize("strategy", ["auto", "single", "direct"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_volumes_equal_a_count_device_by_device(mesh: MeshInfo, strategy: Any) -> None:
    leaves = some_leaves(mesh)
    processes = max(mesh.processes) + 1
    axis = "dp" if strategy == "single" else None
    plan = make_plan(
        leaves, [mesh], Options(strategy=strategy, replica_axis=axis), processes=processes, group_bytes=1 << 22
    )
    found = volumes.count(plan, [mesh], processes)
    chunks = [touched(plan, mesh, process) for process in range(processes)]
    assert found.read.tolist() == [sum(sizes.values()) for sizes in chunks]
    for index in range(len(leaves)):
        by_hand = sum(size for sizes in chunks for (leaf, _), size in sizes.items() if leaf == index)
        assert found.leaf_read[index] == by_hand
        assert found.leaf_needed[index] <= by_hand
    moved = [traffic_by_group(plan, [mesh], process) for process in range(processes)]
    assert found.received.tolist() == [sum(group.received for group in groups) for groups in moved]


def test_the_counted_plans_have_bundles_of_every_kind() -> None:
    kinds: set[Any] = set()
    for mesh in MESHES.values():
        made = make_plan(some_leaves(mesh), [mesh], Options(), processes=max(mesh.processes) + 1, group_bytes=1 << 22)
        bundles = [bundle for group in made.groups for bundle in group.bundles]
        kinds |= {(type(bundle), isinstance(bundle, Pack) and bundle.summed) for bundle in bundles}
        kinds |= {"slice" for leaf in made.leaves if leaf.slice}
    assert kinds == {(Sum, False), (LaneBatch, False), (Pack, False), (Pack, True), "slice"}


def touched(plan: RestorePlan, mesh: MeshInfo, process: int) -> dict[tuple[int, tuple[int, ...]], int]:
    """The chunks that a process reads, by leaf and place, with their bytes: a chunk that is cut off at the end less."""
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    for device, owner in enumerate(mesh.processes):
        if owner != process:
            continue
        at = dict(zip(mesh.axis_names, np.unravel_index(device, mesh.axis_sizes), strict=True))
        for item, cuts in reads(plan, mesh, at):
            leaf = plan.leaves[item]
            source = leaf.slice.leaf if leaf.slice else item
            for place, size in chunks_of(plan.leaves[source], leaf, cuts, at, mesh):
                sizes[source, place] = size
    return sizes


def reads(plan: RestorePlan, mesh: MeshInfo, at: dict[str, Any]) -> list[tuple[int, list[list[str]]]]:
    """What a device reads: items, and by which axes each dimension of them is cut."""
    found: list[tuple[int, list[list[str]]]] = []
    for index in plan.direct:
        found.append((index, [list(axes) for axes in plan.leaves[index].spec]))
    for group in plan.groups:
        replica = 0
        for axis in group.axes:
            replica = replica * mesh.sizes[axis] + at[axis]
        for bundle in group.bundles:
            if isinstance(bundle, LaneBatch):
                lane = 0
                for axis in bundle.lanes:
                    lane = lane * mesh.sizes[axis] + at[axis]
                cuts = [list(axes) for axes in plan.leaves[bundle.leaves[lane]].spec]
                for axis, dim in bundle.splits:
                    cuts[dim].append(axis)
                found.append((bundle.leaves[lane], cuts))
                continue
            assert not isinstance(bundle, ColumnSum | LeafBatch)  # no plan starts with one
            shares = {bundle.reader: bundle.leaves} if isinstance(bundle, Sum) else dict(enumerate(bundle.shares))
            found += [(leaf, [list(axes) for axes in plan.leaves[leaf].spec]) for leaf in shares.get(replica, ())]
    return found


def chunks_of(
    whole: Leaf, item: Leaf, cuts: list[list[str]], at: dict[str, Any], mesh: MeshInfo
) -> list[tuple[tuple[int, ...], int]]:
    ranges, chunk = [], whole.chunk or whole.block
    for dim, axes in enumerate(cuts):
        place, pieces = 0, 1
        for axis in axes:
            place, pieces = place * mesh.sizes[axis] + int(at[axis]), pieces * mesh.sizes[axis]
        width = item.shape[dim] // pieces
        start = place * width
        if item.slice and item.slice.dim == dim:  # the same rows of every device's block
            block = start // item.block[dim]
            start = block * whole.block[dim] + item.slice.start + start % item.block[dim]
        ranges.append(range(start // chunk[dim], -(-(start + width) // chunk[dim])))
    return [
        (
            place,
            math.prod(min(c, s - p * c) for p, c, s in zip(place, chunk, whole.shape, strict=True)) * whole.itemsize,
        )
        for place in itertools.product(*ranges)
    ]
