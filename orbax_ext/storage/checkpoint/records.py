"""What a checkpoint consists of, as plain data: a manager's directory, steps, items, leaves."""

from __future__ import annotations

import dataclasses
import os

from orbax_ext.storage.checkpoint.arrays import StoredArray
from orbax_ext.storage.checkpoint.metadata import SavedSharding
from orbax_ext.storage.filenames import TEMPORARY


@dataclasses.dataclass(frozen=True)
class CommitState:
    """Whether a checkpoint is complete, and how that is known."""

    committed: bool
    because: str


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf of the saved tree. A field that is not known, or does not apply, is None or empty."""

    name: str
    kind: str  # "jax.Array", "np.ndarray", "scalar", "string", "None"...
    array: StoredArray | None = None
    sharding: SavedSharding | None = None
    key_type: str = ""  # of a typed PRNG key
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class CheckpointItem:
    """A directory with a tree of arrays, or with something else that was saved beside one."""

    path: str
    state: CommitState
    handler: str  # the class that saved it, as far as recorded
    bytes_on_disk: int
    files: int
    leaves: tuple[StoredLeaf, ...] = ()
    has_arrays: bool = False
    format: str = "files"  # "zarr2" or "zarr3" if it has a tree
    ocdbt: bool = False
    mesh: tuple[tuple[str, int], ...] = ()  # on which most leaves were saved
    writers: int | None = None  # processes that wrote, as far as recorded
    saved_by: tuple[tuple[int, ...], ...] = ()  # device ids of each process, if a process_metadata item is there

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def logical_bytes(self) -> int:
        return sum(leaf.array.header.logical_bytes for leaf in self.leaves if leaf.array)

    @property
    def stored_bytes(self) -> int:
        return sum(leaf.array.stored_bytes for leaf in self.leaves if leaf.array)


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """One step of a manager's directory, with the names of its items only."""

    path: str
    state: CommitState
    items: tuple[str, ...]
    bytes_on_disk: int
    files: int
    seconds_to_save: float | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def number(self) -> int | None:
        return step_number(self.name)


@dataclasses.dataclass(frozen=True)
class ManagerDirectory:
    """The directory of a `CheckpointManager`."""

    path: str
    steps: tuple[SavedStep, ...]  # committed or not, in order


def step_number(name: str) -> int | None:
    """Returns the number in a step's name, such as "1200" or "step_00001200", or None if it has none."""
    digits = name.partition(TEMPORARY)[0].rpartition("_")[2]
    return int(digits) if digits.isdecimal() else None
