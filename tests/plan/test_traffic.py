"""The plan's arithmetic: what each process reads, receives and sends; what all of them read, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, RestorePlan, make_plan, traffic, workload

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


def test_with_one_reader_it_sends_to_the_others_and_they_receive() -> None:
    plan = _plan([_leaf("w", (8, MIB), (("tp",),))], MESH, strategy="single", replica_axis="dp")
    (of_0,), (of_3,) = (traffic.of_process(plan, [MESH], process) for process in (0, 3))
    assert (of_0.brought, of_0.received, of_0.sent) == (8 * MIB, 0, 3 * 8 * MIB)
    assert (of_3.brought, of_3.received, of_3.sent) == (0, 8 * MIB, 0)


@pytest.mark.parametrize("mesh", [MESH, WIDE], ids=["a process is a replica", "a replica spans processes"])
@pytest.mark.parametrize("strategy", ["single", "spread"])
def test_all_that_is_sent_is_received_and_every_process_ends_with_its_share(mesh: MeshInfo, strategy: str) -> None:
    leaves = [_leaf(f"w{number}", (8, 4 * MIB), (("tp",),), mesh) for number in range(4)]
    plan = _plan(leaves, mesh, strategy=strategy, replica_axis="dp")
    found = [traffic.of_process(plan, [mesh], process) for process in range(4)]
    for group in zip(*found, strict=True):
        assert sum(each.sent for each in group) == sum(each.received for each in group)
    held = sum(leaf.block_bytes for leaf in leaves) * mesh.processes.count(0)
    for each in found:
        assert sum(group.brought + group.received for group in each) == held


def test_small_leaves_are_read_as_they_are_and_travel_padded() -> None:
    leaves = [_leaf("a", (100,)), _leaf("b", (7,))]
    plan = _plan(leaves, MESH, strategy="spread")
    found = [traffic.of_process(plan, [MESH], process)[0] for process in range(4)]
    # Two of the 32 devices read one each; all the others' vectors are as long as the longer one, in words of 8 bytes.
    assert sorted(each.brought for each in found) == [0, 0, 0, 107]
    assert sum(each.sent for each in found) == sum(each.received for each in found)


def test_copies_on_one_process_do_not_count_as_received() -> None:
    one = MeshInfo(("dp",), (4,), (0, 0, 0, 0))
    plan = make_plan(
        [_leaf("w", (MIB,), (), one)], [one], Options(strategy="single"), processes=1, group_bytes=64 * MIB
    )
    assert [(each.received, each.sent) for each in traffic.of_process(plan, [one], 0)] == [(0, 0)]


def test_a_plan_reads_every_byte_once_save_what_each_reads_for_itself() -> None:
    leaves = [_leaf("w", (8, 4 * MIB), (("tp",),)), Leaf("key", (2,), "uint32", direct_because="it is a key")]
    plan = _plan(leaves, MESH, strategy="spread")
    assert sum(workload.steps(plan, [MESH], 4).values()) == 32 * MIB + 4 * 2 * 4


@pytest.mark.parametrize(
    ("spec", "copies"), [((("tp",),), 4), ((("dp", "tp"),), 1), ((), 4)], ids=["on tp", "on all", "on none"]
)
def test_without_exchange_each_process_reads_the_blocks_that_it_holds(
    spec: tuple[tuple[str, ...], ...], copies: int
) -> None:
    plan = _plan([_leaf("w", (32, MIB), spec)], MESH, strategy="direct")
    assert workload.steps(plan, [MESH], 4) == {None: copies * 32 * MIB}


def test_a_leaf_of_an_unknown_type_is_guessed() -> None:
    plan = _plan([Leaf("odd", (10,), "None", direct_because="its shape or dtype is not known")], MESH)
    assert workload.steps(plan, [MESH], 4) == {None: 4 * 40}
