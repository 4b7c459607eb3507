"""Which leaves travel and which are read directly: the plan that a restore starts with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from orbax_ext.options import Options
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import RestorePlan, make_plan, who_travels
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import Load, Loads

_TINY_BYTES = 1 << 20  # of what a process reads, below which nothing is gained by reading less
_TINY_ARRAYS = 32


def choose_plan(
    leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], options: Options, *, processes: int, group_bytes: int
) -> RestorePlan:
    """Returns the plan for these leaves; for strategy "auto", with direct reads only if the state is tiny."""
    plan = make_plan(leaves, meshes, options, processes=processes, group_bytes=group_bytes)
    travelling = plan.sources(plan.groups)
    if options.strategy != "auto" or not is_tiny(Loads(leaves, meshes, processes).direct(travelling)):
        return plan
    reason = "the state is too small to be worth an exchange"
    return dataclasses.replace(plan, groups=(), direct={**plan.direct, **dict.fromkeys(travelling, reason)})


def anything_travels(leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], options: Options, *, processes: int) -> bool:
    """Returns whether any leaf may travel from process to process.

    The answer does not depend on the memory limit, on which processes agree later, so it is the same on all of them.
    """
    _, travelling = who_travels(leaves, meshes, options, processes=processes)
    indices = [index for kind in travelling.values() for index in kind]
    if options.strategy == "auto":
        return not is_tiny(Loads(leaves, meshes, processes).direct(indices))
    return bool(indices)


def is_tiny(load: Load) -> bool:
    """Returns whether a load is too small to be worth an exchange."""
    return load.read < _TINY_BYTES and load.arrays < _TINY_ARRAYS
