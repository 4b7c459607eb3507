"""What a restore will do, worked out from plain data: no devices, no I/O, the same on every process."""

from orbax_ext.plan.bundles import Bundle, Pack, Stack, Sum
from orbax_ext.plan.cost import Costs, Load, Rates, with_cheapest
from orbax_ext.plan.leaves import Leaf, Part
from orbax_ext.plan.planner import Group, RestorePlan, make_plan
from orbax_ext.plan.topology import MeshInfo

__all__ = [
    "Bundle",
    "Costs",
    "Group",
    "Leaf",
    "Load",
    "MeshInfo",
    "Pack",
    "Part",
    "Rates",
    "RestorePlan",
    "Stack",
    "Sum",
    "make_plan",
    "with_cheapest",
]
