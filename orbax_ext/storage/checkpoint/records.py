"""What there is to say of a checkpoint, as plain data."""

from __future__ import annotations

import dataclasses
import os

from orbax_ext.storage.checkpoint.arrays import StoredArray
from orbax_ext.storage.checkpoint.trees import SavedSharding

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that is not complete yet


@dataclasses.dataclass(frozen=True)
class State:
    """Whether a checkpoint is complete, and what that rests on."""

    committed: bool
    because: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the saved tree. What is not known of it, or does not apply, is None."""

    name: str
    kind: str  # "jax.Array", "np.ndarray", "scalar", "string", "None"...
    array: StoredArray | None = None
    sharding: SavedSharding | None = None
    key_type: str = ""  # of a typed PRNG key
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Item:
    """A directory with a tree of arrays, or with something else that was saved beside one."""

    path: str
    state: State
    handler: str  # the class that saved it, as far as recorded
    bytes_on_disk: int
    files: int
    leaves: tuple[Leaf, ...] = ()
    has_arrays: bool = False
    format: str = ""  # "zarr2" or "zarr3", or "files" for what is no tree
    in_database: bool = False  # OCDBT
    mesh: tuple[tuple[str, int], ...] = ()  # that most leaves were saved on
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
class Step:
    """One step of a manager's directory, without a look into its items."""

    path: str
    state: State
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
class Manager:
    """A `CheckpointManager`'s directory."""

    path: str
    steps: tuple[Step, ...]  # committed or not, in order


def step_number(name: str) -> int | None:
    digits = name.partition(TEMPORARY)[0].rpartition("_")[2]  # "1200", or "step_00001200"
    return int(digits) if digits.isdecimal() else None
