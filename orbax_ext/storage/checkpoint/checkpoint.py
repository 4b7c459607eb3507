"""From a path to what is there: a manager's directory, a step, or an item with its tree of arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from orbax_ext.storage import s3
from orbax_ext.storage.checkpoint import folders
from orbax_ext.storage.checkpoint.commits import STEP, check_committed, record_of, state_of
from orbax_ext.storage.checkpoint.errors import NotACheckpointError, UnfinishedError
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.items import TREE, describe, is_item
from orbax_ext.storage.checkpoint.records import TEMPORARY, Item, Manager, Step, step_number


def inspect(path: epath.PathLike, step: int | None = None) -> Manager | list[Item]:
    """A `Manager` for a directory of steps; the items for a step, one of a manager's steps, or an item itself."""
    root = _absolute(path)
    folder = _look(root)
    if step is not None:
        return _items(_step_folder(folder, step))
    if is_item(folder) or _is_step(folder):
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
    check_committed(folder, record_of(folder))
    found = [folder] if is_item(folder) else [inner for inner in _inner(folder) if is_item(inner)]
    if not found:
        raise NotACheckpointError(f"{os.fspath(folder.path)} holds no arrays")
    return [each.path for each in found]


def _chosen(path: epath.PathLike, step: int | None) -> Folder:
    """The step or item that a path stands for."""
    folder = _look(_absolute(path))
    if step is not None:
        return _step_folder(folder, step)
    if is_item(folder) or _is_step(folder):
        return folder
    steps = _steps(folder)
    committed = [each for each in steps if each.state.committed]
    if committed:
        return _look(epath.Path(committed[-1].path))
    if steps:
        raise UnfinishedError(f"{path} has no committed step: {steps[-1].name}: {steps[-1].state.because}")
    raise NotACheckpointError(_what_it_is(folder))


def _absolute(path: epath.PathLike) -> epath.Path:
    """TensorStore takes no others."""
    text = os.fspath(path)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def _look(path: epath.Path) -> Folder:
    try:
        return folders.look(path)
    except FileNotFoundError as error:
        told = str(error) if s3.is_s3(os.fspath(path)) else f"{os.fspath(path)} does not exist"
        raise NotACheckpointError(told.rstrip(".")) from None
    except NotADirectoryError:
        raise NotACheckpointError(f"{os.fspath(path)} is a file; give a directory of a checkpoint") from None


def _inner(folder: Folder) -> Iterator[Folder]:
    """The directories in a directory; some may go away while we look, or be links to nowhere."""
    for name in folder.folders:
        with contextlib.suppress(NotACheckpointError):
            yield _look(folder.path / name)


def _is_step(folder: Folder) -> bool:
    if STEP in folder.files:
        return True
    return any(is_item(inner) for inner in _inner(folder) if step_number(inner.path.name) is None)


def _steps(folder: Folder) -> tuple[Step, ...]:
    found = []
    for inner in _inner(folder):
        name = inner.path.name
        if STEP in inner.files or TEMPORARY in name or (step_number(name) is not None and _is_step(inner)):
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
    record = record_of(folder)
    sizes = folders.sizes_below(folder.path)
    began, ended = record.get("init_timestamp_nsecs"), record.get("commit_timestamp_nsecs")
    return Step(
        os.fspath(folder.path),
        state_of(folder, record),
        folder.folders,
        sum(sizes.values()),
        len(sizes),
        (ended - began) / 1e9 if began and ended else None,
    )


def _items(folder: Folder) -> list[Item]:
    """The items of a step, or the item that this directory is. Raises for what was never committed."""
    record = record_of(folder)
    state = check_committed(folder, record)
    handlers = record.get("item_handlers")
    if is_item(folder):
        return [describe(folder, state, handlers if isinstance(handlers, str) else "")]
    by_name: Mapping[str, Any] = handlers if isinstance(handlers, dict) else {}
    saved_by = _process_metadata(folder)
    found = []
    for inner in _inner(folder):
        item = describe(inner, state, str(by_name.get(inner.path.name) or ""))
        found.append(dataclasses.replace(item, saved_by=saved_by))
    return found


def _process_metadata(folder: Folder) -> tuple[tuple[int, ...], ...]:
    """What Orbax's emergency checkpoints record of the job: the device ids of each process."""
    if "process_metadata" not in folder.folders:
        return ()
    text = _look(folder.path / "process_metadata").text("global_process_metadata.json")
    return tuple(tuple(int(device) for device in devices) for devices in json.loads(text or "[]"))


def _what_it_is(folder: Folder) -> str:
    path = os.fspath(folder.path)
    if not folder.files and not folder.folders:
        return f"{path} is empty: no step was saved here"
    seen = ", ".join([*folder.folders, *folder.files][:5])
    return (
        f"{path} is no Orbax checkpoint: neither it nor a directory in it has {STEP} or {TREE}; found {seen}"
        f"{'...' if len(folder.folders) + len(folder.files) > 5 else ''}"
    )
