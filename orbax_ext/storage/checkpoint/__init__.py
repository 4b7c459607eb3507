"""What a checkpoint on disk or S3 holds, from its metadata alone: no devices, no `jax.distributed`, no array data."""

from orbax_ext.storage.checkpoint.arrays import StoredArray
from orbax_ext.storage.checkpoint.inspection import UnfinishedError, inspect, items_of, locate
from orbax_ext.storage.checkpoint.items import NotACheckpointError
from orbax_ext.storage.checkpoint.mapped_specs import MappedSpecs, map_specs
from orbax_ext.storage.checkpoint.metadata import SavedSharding
from orbax_ext.storage.checkpoint.records import CheckpointItem, ManagerDirectory, SavedStep, StoredLeaf
from orbax_ext.storage.checkpoint.stored_tree import LeafFacts, StoredTree, read_tree

__all__ = [
    "CheckpointItem",
    "LeafFacts",
    "ManagerDirectory",
    "MappedSpecs",
    "NotACheckpointError",
    "SavedSharding",
    "SavedStep",
    "StoredArray",
    "StoredLeaf",
    "StoredTree",
    "UnfinishedError",
    "inspect",
    "items_of",
    "locate",
    "map_specs",
    "read_tree",
]
