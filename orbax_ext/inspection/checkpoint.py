"""From a path to what is there: a manager's directory, a step, or an item with its tree of arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from orbax_ext import storage
from orbax_ext.inspection import folders, trees
from orbax_ext.inspection.arrays import StoredArray, stored_arrays
from orbax_ext.inspection.errors import NotACheckpointError, UnfinishedError
from orbax_ext.inspection.folders import Folder
from orbax_ext.inspection.trees import SavedSharding

_TREE = "_METADATA"
_SHARDINGS = "_sharding"
_STEP = "_CHECKPOINT_METADATA"
_COMMIT = "commit_success.txt"
_TEMPORARY = ".orbax-checkpoint-tmp"
_DATABASE = "manifest.ocdbt"
_WRITER = re.compile(r"(?:ocdbt\.)?process_(\d+)")


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


def inspect(path: epath.PathLike, step: int | None = None) -> Manager | list[Item]:
    """A `Manager` for a directory of steps; the items for a step, one of a manager's steps, or an item itself."""
    root = epath.Path(path)
    folder = _look(root)
    if step is not None:
        return _items(_step_folder(folder, step))
    if _is_item(folder) or _is_step(folder):
        return _items(folder)
    if steps := _steps(folder):
        return Manager(os.fspath(root), steps)
    raise NotACheckpointError(_what_it_is(folder))


def items_of(path: epath.PathLike, step: int | None = None) -> list[Item]:
    """The items at a path; of a manager's directory, those of the given or the newest committed step."""
    return _items(_chosen(path, step))


def locate(path: epath.PathLike, step: int | None = None) -> list[epath.Path]:
    """The directories of arrays among them, without a look at the arrays."""
    folder = _chosen(path, step)
    _check_committed(folder, _record(folder))
    found = [folder] if _is_item(folder) else [inner for inner in _inner(folder) if _is_item(inner)]
    if not found:
        raise NotACheckpointError(f"{os.fspath(folder.path)} holds no arrays")
    return [each.path for each in found]


def _chosen(path: epath.PathLike, step: int | None) -> Folder:
    """The step or item that a path stands for."""
    folder = _look(epath.Path(path))
    if step is not None:
        return _step_folder(folder, step)
    if _is_item(folder) or _is_step(folder):
        return folder
    steps = _steps(folder)
    committed = [each for each in steps if each.state.committed]
    if committed:
        return _look(epath.Path(committed[-1].path))
    if steps:
        raise UnfinishedError(f"{path} has no committed step: {steps[-1].name}: {steps[-1].state.because}")
    raise NotACheckpointError(_what_it_is(folder))


def step_number(name: str) -> int | None:
    digits = name.partition(_TEMPORARY)[0].rpartition("_")[2]  # "1200", or "step_00001200"
    return int(digits) if digits.isdecimal() else None


def _look(path: epath.Path) -> Folder:
    try:
        return folders.look(path)
    except FileNotFoundError as error:
        told = str(error) if storage.is_s3(os.fspath(path)) else f"{os.fspath(path)} does not exist"
        raise NotACheckpointError(told.rstrip(".")) from None
    except NotADirectoryError:
        raise NotACheckpointError(f"{os.fspath(path)} is a file; give a directory of a checkpoint") from None


def _inner(folder: Folder) -> Iterator[Folder]:
    """The directories in a directory; some may go away while we look, or be links to nowhere."""
    for name in folder.folders:
        with contextlib.suppress(NotACheckpointError):
            yield _look(folder.path / name)


def _is_item(folder: Folder) -> bool:
    return _TREE in folder.files or _DATABASE in folder.files


def _is_step(folder: Folder) -> bool:
    if _STEP in folder.files:
        return True
    return any(_is_item(inner) for inner in _inner(folder) if step_number(inner.path.name) is None)


def _steps(folder: Folder) -> tuple[Step, ...]:
    found = []
    for inner in _inner(folder):
        name = inner.path.name
        if _STEP in inner.files or _TEMPORARY in name or (step_number(name) is not None and _is_step(inner)):
            found.append(_step(inner))
    return tuple(sorted(found, key=lambda step: (step.number is None, step.number or 0, step.name)))


def _step_folder(folder: Folder, step: int) -> Folder:
    numbered = {name: number for name in folder.folders if (number := step_number(name)) is not None}
    named = [name for name, number in numbered.items() if number == step]
    if not named:
        there = ", ".join(sorted(numbered, key=lambda name: numbered[name])) or "none"
        raise NotACheckpointError(f"{os.fspath(folder.path)} has no step {step}; it has {there}")
    return _look(folder.path / min(named, key=len))


def _step(folder: Folder) -> Step:
    record = _record(folder)
    sizes = folders.sizes_below(folder.path)
    began, ended = record.get("init_timestamp_nsecs"), record.get("commit_timestamp_nsecs")
    return Step(
        os.fspath(folder.path),
        _state(folder, record),
        folder.folders,
        sum(sizes.values()),
        len(sizes),
        (ended - began) / 1e9 if began and ended else None,
    )


def _items(folder: Folder) -> list[Item]:
    """The items of a step, or the item that this directory is. Raises for what was never committed."""
    record = _record(folder)
    state = _check_committed(folder, record)
    handlers = record.get("item_handlers")
    if _is_item(folder):
        return [_item(folder, state, handlers if isinstance(handlers, str) else "")]
    by_name: Mapping[str, Any] = handlers if isinstance(handlers, dict) else {}
    saved_by = _process_metadata(folder)
    found = []
    for inner in _inner(folder):
        item = _item(inner, state, str(by_name.get(inner.path.name) or ""))
        found.append(dataclasses.replace(item, saved_by=saved_by))
    return found


def _item(folder: Folder, state: State, handler: str) -> Item:
    path = os.fspath(folder.path)
    sizes = folders.sizes_below(folder.path)
    in_database = _DATABASE in folder.files
    plain = Item(path, state, handler, sum(sizes.values()), len(sizes), format="files")
    if not _is_item(folder):
        return plain
    try:
        tree = trees.parse_tree(folder.text(_TREE) or '{"tree_metadata": {}}')
        shardings = trees.parse_shardings(folder.text(_SHARDINGS) or "{}")
        key_types: dict[str, str] = {}
        for name in sizes:
            if name.startswith("array_metadatas/"):
                key_types.update(trees.parse_key_types((folder.path / name).read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise NotACheckpointError(f"the metadata in {path} can't be understood: {error!r}") from error
    if tree.in_database and not in_database:
        raise NotACheckpointError(
            f"{path} has lost its arrays: {_TREE} says that they are in an OCDBT database, but {_DATABASE} is missing"
        )
    arrays = _arrays(folder.path, in_database, sizes)
    leaves = [_leaf(leaf, arrays, shardings, key_types) for leaf in tree.leaves]
    if not leaves:  # of a release that did not write the tree down
        leaves = [Leaf(name, "array", array, shardings.get(name)) for name, array in arrays.items()]
    zarr3 = any(array.zarr3 for array in arrays.values()) or bool(tree.zarr3)
    return dataclasses.replace(
        plain,
        leaves=tuple(leaves),
        has_arrays=True,
        format="zarr3" if zarr3 else "zarr2",
        in_database=in_database,
        mesh=trees.most_common_mesh(shardings),
        writers=_writers(sizes),
    )


def _leaf(
    leaf: trees.TreeLeaf,
    arrays: Mapping[str, StoredArray],
    shardings: Mapping[str, SavedSharding],
    key_types: Mapping[str, str],
) -> Leaf:
    array = arrays.get(leaf.name)
    lost = leaf.stored and array is None and leaf.kind not in ("string", "bytes")
    problem = "its array is missing" if lost else ""
    return Leaf(leaf.name, leaf.kind, array, shardings.get(leaf.name), key_types.get(leaf.name, ""), problem)


def _arrays(path: epath.Path, in_database: bool, sizes: Mapping[str, int]) -> dict[str, StoredArray]:
    try:
        return stored_arrays(path, in_database, sizes)
    except (ValueError, KeyError) as error:  # TensorStore's word for what is damaged is ValueError
        better = storage.explain(error, os.fspath(path))
        raise NotACheckpointError(f"the arrays of {path} can't be listed: {str(better).splitlines()[0]}") from None


def _writers(sizes: Mapping[str, int]) -> int | None:
    found = {match[1] for name in sizes for part in name.split("/")[:2] if (match := _WRITER.fullmatch(part))}
    return len(found) or None


def _process_metadata(folder: Folder) -> tuple[tuple[int, ...], ...]:
    """What Orbax's emergency checkpoints record of the job: the device ids of each process."""
    if "process_metadata" not in folder.folders:
        return ()
    text = _look(folder.path / "process_metadata").text("global_process_metadata.json")
    return tuple(tuple(int(device) for device in devices) for devices in json.loads(text or "[]"))


def _record(folder: Folder) -> Mapping[str, Any]:
    try:
        found = json.loads(folder.text(_STEP) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _state(folder: Folder, record: Mapping[str, Any]) -> State:
    """A checkpoint becomes complete by a rename, or where there is none by a file that is written last."""
    path = os.fspath(folder.path)
    if _TEMPORARY in path:
        return State(False, f"its save was interrupted or is under way ({_TEMPORARY} is in its name)")
    if _COMMIT in folder.files:
        return State(True, f"{_COMMIT} is there")
    if "://" in path and not _is_below_committed(folder):
        return State(False, f"its save was interrupted or is under way (there is no {_COMMIT})")
    if record and not record.get("commit_timestamp_nsecs"):
        return State(False, f"its save was interrupted or is under way (no time of commit in {_STEP})")
    return State(True, f"{_STEP} has the time of it" if record else "it has its final name")


def _check_committed(folder: Folder, record: Mapping[str, Any]) -> State:
    state = _state(folder, record)
    if not state.committed:
        raise UnfinishedError(f"{os.fspath(folder.path)} is not a complete checkpoint: {state.because}")
    return state


def _is_below_committed(folder: Folder) -> bool:
    """An item of a step need not have a commit file of its own."""
    return _COMMIT in _look(folder.path.parent).files


def _what_it_is(folder: Folder) -> str:
    path = os.fspath(folder.path)
    if not folder.files and not folder.folders:
        return f"{path} is empty: no step was saved here"
    seen = ", ".join([*folder.folders, *folder.files][:5])
    return (
        f"{path} is no Orbax checkpoint: neither it nor a directory in it has {_STEP} or {_TREE}; found {seen}"
        f"{'...' if len(folder.folders) + len(folder.files) > 5 else ''}"
    )
