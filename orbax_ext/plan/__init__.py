"""What a restore will do, worked out from plain data: no devices, no I/O, the same on every process."""

from orbax_ext.plan.bundles import Bundle, LaneBatch, Pack, Sum
from orbax_ext.plan.choose import anything_travels, choose_plan, with_cheapest
from orbax_ext.plan.cost import Costs, Load, Rates
from orbax_ext.plan.leaves import Leaf, Slice
from orbax_ext.plan.planner import Group, RestorePlan, make_plan
from orbax_ext.plan.topology import MeshInfo

__all__ = [
    "Bundle",
    "Costs",
    "Group",
    "LaneBatch",
    "Leaf",
    "Load",
    "MeshInfo",
    "Pack",
    "Rates",
    "RestorePlan",
    "Slice",
    "Sum",
    "anything_travels",
    "choose_plan",
    "make_plan",
    "with_cheapest",
]
