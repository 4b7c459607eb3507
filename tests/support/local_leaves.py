"""Leaves of a local checkpoint on small meshes, for tests of plans."""

from __future__ import annotations

from orbax_ext.plan.holders import Columns
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo

# 4 processes x 2 devices.
ONE_HOST = MeshInfo(("dp", "tp"), (4, 2), (0, 0, 1, 1, 2, 2, 3, 3))
TWO_HOSTS = MeshInfo(("dp", "tp"), (2, 4), (0, 0, 1, 1, 2, 2, 3, 3))

SHARDED, REPLICATED = (("tp",), ()), ((), ())


def leaf(mesh: MeshInfo, spec: tuple[tuple[str, ...], ...] = SHARDED, rows: int = 8, width: int = 8) -> Leaf:
    parts = mesh.sizes["tp"] if spec == SHARDED else 1
    return Leaf("leaf", (rows, width), "float32", 4, (rows // parts, width), mesh=0, spec=spec)


def columns_of(count: int, columns: Columns) -> dict[int, Columns]:
    return dict.fromkeys(range(count), columns)
