"""What a checkpoint holds, from its metadata alone: no devices, no `jax.distributed`, no array data.

    found = inspection.inspect("/ckpt/run7")  # a Manager, a Step or an Item

Works on local disks and, once `orbax_ext.storage.enable_s3` was called, on s3://.
"""

from orbax_ext.storage.checkpoint.arrays import StoredArray
from orbax_ext.storage.checkpoint.checkpoint import inspect, items_of, locate
from orbax_ext.storage.checkpoint.errors import NotACheckpointError, UnfinishedError
from orbax_ext.storage.checkpoint.records import Item, Leaf, Manager, State, Step
from orbax_ext.storage.checkpoint.trees import SavedSharding

__all__ = [
    "Item",
    "Leaf",
    "Manager",
    "NotACheckpointError",
    "SavedSharding",
    "State",
    "Step",
    "StoredArray",
    "UnfinishedError",
    "inspect",
    "items_of",
    "locate",
]
