"""A course whose plan has groups of all kinds: cut, read by one replica each, packed."""

from __future__ import annotations

from orbax_ext.options import Options
from orbax_ext.plan import ColumnSum, Group, Leaf, MeshInfo
from orbax_ext.plan.course import Course
from orbax_ext.plan.planner import make_plan

MESH = MeshInfo(("dp", "tp"), (4, 2), tuple(number // 2 for number in range(8)))  # each process is a replica
WIDE = MeshInfo(("dp", "tp"), (2, 4), tuple(number // 2 for number in range(8)))  # two processes make a replica
PROCESSES = 4


def make_leaves(mesh: MeshInfo) -> list[Leaf]:
    tp = mesh.sizes["tp"]
    return [
        *[
            Leaf(f"cut {n}", (512 * tp, 512), "float32", 4, (512, 512), 0, (("tp",), ()), (32, 512), True)
            for n in range(6)
        ],
        *[Leaf(f"lane {n}", (512 * tp, 256), "float32", 4, (512, 256), 0, (("tp",), ())) for n in range(7)],
        *[Leaf(f"small {n}", (9,), "float32", 4, (9,), 0, ((),)) for n in range(9)],
        *[Leaf(f"few {n}", (9 * tp,), "float32", 4, (9,), 0, (("tp",),)) for n in range(4)],
    ]


LEAVES = make_leaves(MESH)


def make_course(strategy: str, mesh: MeshInfo = MESH) -> Course:
    """Returns a course of four processes."""
    options = Options(strategy=strategy)  # type: ignore[arg-type]
    return Course(make_plan(make_leaves(mesh), [mesh], options, processes=PROCESSES, group_bytes=2 << 20), [mesh])


def readers_by_column(group: Group, mesh: MeshInfo) -> list[set[int]]:
    """Returns the processes that read something of a group without lanes, by column of the table of replicas."""
    table = mesh.owners(group.axes)
    read: list[set[int]] = [set() for _ in table[0]]
    for bundle in group.bundles:
        if isinstance(bundle, ColumnSum):
            replicas = [[replica] for replica in bundle.readers]
        else:
            replicas = [[replica for one in bundle.reads() for replica in [one.replica] if replica is not None]] * len(
                read
            )
        for at, rows in enumerate(replicas):
            read[at] |= {int(table[row, at]) for row in rows}
    return read
