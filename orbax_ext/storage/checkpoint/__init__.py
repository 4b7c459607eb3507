"""What a checkpoint holds, from its metadata alone: no devices, no `jax.distributed`, no array data.

    checkpoint.inspect("/ckpt/run7")  # a ManagerDirectory with its steps, or the items of one step

Works on local disks and, once `orbax_ext.storage.enable_s3` was called, on s3://.
"""

from orbax_ext.storage.checkpoint.arrays import StoredArray
from orbax_ext.storage.checkpoint.inspection import UnfinishedError, inspect, items_of, locate
from orbax_ext.storage.checkpoint.items import NotACheckpointError
from orbax_ext.storage.checkpoint.metadata import SavedSharding
from orbax_ext.storage.checkpoint.records import CheckpointItem, ManagerDirectory, SavedStep, StoredLeaf

__all__ = [
    "CheckpointItem",
    "ManagerDirectory",
    "NotACheckpointError",
    "SavedSharding",
    "SavedStep",
    "StoredArray",
    "StoredLeaf",
    "UnfinishedError",
    "inspect",
    "items_of",
    "locate",
]
