"""What a restore will do, worked out from plain data: no devices, no I/O, the same result on every process."""

from orbax_ext.plan.bundles import Bundle, ColumnSum, LaneBatch, LeafBatch, Pack, Sum
from orbax_ext.plan.choose import anything_travels, choose_plan
from orbax_ext.plan.cost import Rates
from orbax_ext.plan.cutting import piece_shape
from orbax_ext.plan.leaves import Leaf, Slice
from orbax_ext.plan.planner import Group, RestorePlan, digest
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import Traffic, bytes_by_step, traffic_by_group

__all__ = [
    "Bundle",
    "ColumnSum",
    "Group",
    "LaneBatch",
    "Leaf",
    "LeafBatch",
    "MeshInfo",
    "Pack",
    "Rates",
    "RestorePlan",
    "Slice",
    "Sum",
    "Traffic",
    "anything_travels",
    "bytes_by_step",
    "choose_plan",
    "digest",
    "piece_shape",
    "traffic_by_group",
]
