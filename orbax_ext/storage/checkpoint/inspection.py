"""Finds what a path is: a manager's directory, a step, or an item with arrays; and whether it is complete."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from orbax_ext import text as text_lib
from orbax_ext.storage import s3
from orbax_ext.storage.checkpoint import folders
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.items import NotACheckpointError, describe_item, has_arrays
from orbax_ext.storage.checkpoint.records import CheckpointItem, CommitState, ManagerDirectory, SavedStep, step_number
from orbax_ext.storage.filenames import COMMIT_FILE, STEP_METADATA, TEMPORARY, TREE_METADATA


class UnfinishedError(ValueError):
    """The checkpoint was never committed: its save was interrupted, or is under way."""


def inspect(path: epath.PathLike, step: int | None = None) -> ManagerDirectory | list[CheckpointItem]:
    """Returns the steps of a manager's directory, or the items of a step; an item's directory is one item."""
    folder, steps = _find(path, step)
    if steps:
        return ManagerDirectory(os.fspath(folder.path), tuple(map(_step, steps)))
    return _items(folder, sizes_wanted=True)


def items_of(path: epath.PathLike, step: int | None = None, *, sizes_wanted: bool = True) -> list[CheckpointItem]:
    """Returns the items at a path; of a manager's directory, those of the given or the newest committed step.

    Without `sizes_wanted` all sizes on disk are 0: to find them takes a look at every file.
    """
    return _items(_step_or_item(path, step), sizes_wanted)


def locate(path: epath.PathLike, step: int | None = None) -> list[epath.Path]:
    """Returns the directories with arrays among the items at a path, without looking at the arrays."""
    folder = _step_or_item(path, step)
    check_committed(folder, step_metadata(folder))
    items = [folder] if has_arrays(folder) else [inner for inner in _inner(folder) if has_arrays(inner)]
    if not items:
        raise NotACheckpointError(f"{os.fspath(folder.path)} holds no arrays")
    return [item.path for item in items]


def step_metadata(folder: Folder) -> Mapping[str, Any]:
    """Returns Orbax's metadata of a step; empty if there is none or it is damaged."""
    try:
        content = json.loads(folder.text(STEP_METADATA) or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def commit_state(folder: Folder, metadata: Mapping[str, Any]) -> CommitState:
    """Returns whether a checkpoint is complete. A rename commits it or, on object stores, a file written last."""
    path = os.fspath(folder.path)
    if TEMPORARY in path:
        return CommitState(False, f"its save was interrupted or is under way ({TEMPORARY} is in its name)")
    if COMMIT_FILE in folder.files:
        return CommitState(True, f"{COMMIT_FILE} is there")
    # An item of a step need not have a commit file of its own.
    if "://" in path and COMMIT_FILE not in folders.list_folder(folder.path.parent).files:
        return CommitState(False, f"its save was interrupted or is under way (there is no {COMMIT_FILE})")
    if metadata and not metadata.get("commit_timestamp_nsecs"):
        return CommitState(False, f"its save was interrupted or is under way (no time of commit in {STEP_METADATA})")
    return CommitState(True, f"{STEP_METADATA} has the time of it" if metadata else "it has its final name")


def check_committed(folder: Folder, metadata: Mapping[str, Any]) -> CommitState:
    """Raises `UnfinishedError` if a checkpoint is not complete."""
    state = commit_state(folder, metadata)
    if not state.committed:
        raise UnfinishedError(f"{os.fspath(folder.path)} is not a complete checkpoint: {state.because}")
    return state


def _find(path: epath.PathLike, step: int | None) -> tuple[Folder, list[Folder]]:
    """Returns the directory of the step or item at a path; or a manager's directory and those of its steps."""
    folder = _list(path)
    if step is not None:
        return _step_folder(folder, step), []
    if has_arrays(folder) or _is_step(folder):
        return folder, []
    if steps := _steps(folder):
        return folder, steps
    names = [*folder.folders, *folder.files]
    if not names:
        raise NotACheckpointError(f"{os.fspath(folder.path)} is empty: no step was saved here")
    raise NotACheckpointError(
        f"{os.fspath(folder.path)} is no Orbax checkpoint: neither it nor a directory in it has {STEP_METADATA} or "
        f"{TREE_METADATA}; it has {text_lib.listing(names, 5)}"
    )


def _step_or_item(path: epath.PathLike, step: int | None) -> Folder:
    """Returns the directory of the step or item that a path stands for."""
    folder, steps = _find(path, step)
    if not steps:
        return folder
    for inner in reversed(steps):
        if commit_state(inner, step_metadata(inner)).committed:
            return inner
    because = commit_state(steps[-1], step_metadata(steps[-1])).because
    raise UnfinishedError(f"{path} has no committed step: {steps[-1].path.name}: {because}")


def _list(path: epath.PathLike) -> Folder:
    """Lists a directory, by its absolute path: TensorStore takes no others."""
    text = os.fspath(path)
    text = text if "://" in text else os.path.abspath(text)
    try:
        return folders.list_folder(epath.Path(text))
    except FileNotFoundError as error:
        raise NotACheckpointError(str(error).rstrip(".") if s3.is_s3(text) else _missing(text)) from None
    except NotADirectoryError:
        raise NotACheckpointError(f"{text} is a file; give a directory of a checkpoint") from None


def _missing(path: str) -> str:
    """Returns that a local path does not exist, and what the nearest directory above it has."""
    above = os.path.dirname(path)
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(above))
        return f"{path} does not exist; {above} has {text_lib.listing(names, 5) or 'nothing in it'}"
    return f"{path} does not exist"


def _inner(folder: Folder) -> Iterator[Folder]:
    """Yields the directories in a directory; some may disappear meanwhile, or be links to nowhere."""
    for name in folder.folders:
        with contextlib.suppress(NotACheckpointError):
            yield _list(folder.path / name)


def _is_step(folder: Folder) -> bool:
    items = (inner for inner in _inner(folder) if step_number(inner.path.name) is None)
    return STEP_METADATA in folder.files or any(map(has_arrays, items))


def _steps(folder: Folder) -> list[Folder]:
    """Returns the directories of the steps in a manager's directory, in order."""
    steps: list[tuple[int | None, str, Folder]] = []
    for inner in _inner(folder):
        name = inner.path.name
        if STEP_METADATA in inner.files or TEMPORARY in name or (step_number(name) is not None and _is_step(inner)):
            steps.append((step_number(name), name, inner))
    return [inner for _, _, inner in sorted(steps, key=lambda step: (step[0] is None, step[0] or 0, step[1]))]


def _step_folder(folder: Folder, step: int) -> Folder:
    numbers = {name: number for name in folder.folders if (number := step_number(name)) is not None}
    names = [name for name, number in numbers.items() if number == step]
    if not names and (has_arrays(folder) or _is_step(folder)):
        raise NotACheckpointError(f"{os.fspath(folder.path)} is a step or an item itself: it has no step {step} in it")
    if not names:
        others = ", ".join(sorted(numbers, key=lambda name: numbers[name])) or "none"
        raise NotACheckpointError(f"{os.fspath(folder.path)} has no step {step}; it has {others}")
    return _list(folder.path / min(names, key=len))  # the shortest name is the one without TEMPORARY


def _step(folder: Folder) -> SavedStep:
    metadata = step_metadata(folder)
    sizes = folders.sizes_below(folder.path)
    started, committed = metadata.get("init_timestamp_nsecs"), metadata.get("commit_timestamp_nsecs")
    return SavedStep(
        os.fspath(folder.path),
        commit_state(folder, metadata),
        folder.folders,
        sum(sizes.values()),
        len(sizes),
        (committed - started) / 1e9 if started and committed else None,
    )


def _items(folder: Folder, sizes_wanted: bool) -> list[CheckpointItem]:
    """Returns the items of a step, or the item that this directory is. Raises `UnfinishedError`."""
    metadata = step_metadata(folder)
    state = check_committed(folder, metadata)
    handlers = metadata.get("item_handlers")
    if has_arrays(folder):
        handler = handlers if isinstance(handlers, str) else ""
        return [describe_item(folder, state, handler, sizes_wanted=sizes_wanted)]
    by_name: Mapping[str, Any] = handlers if isinstance(handlers, dict) else {}
    saved_by = _process_metadata(folder)
    items = [
        describe_item(inner, state, str(by_name.get(inner.path.name) or ""), sizes_wanted=sizes_wanted)
        for inner in _inner(folder)
    ]
    return [dataclasses.replace(item, saved_by=saved_by) for item in items]


def _process_metadata(folder: Folder) -> tuple[tuple[int, ...], ...]:
    """Returns the device ids of each process that saved, which Orbax's emergency checkpoints record."""
    if "process_metadata" not in folder.folders:
        return ()
    text = _list(folder.path / "process_metadata").text("global_process_metadata.json")
    return tuple(tuple(int(device) for device in devices) for devices in json.loads(text or "[]"))
