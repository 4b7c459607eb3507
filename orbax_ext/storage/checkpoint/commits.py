"""Whether a checkpoint is complete: by its name, by a file that is written last, or by a time in its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from orbax_ext.storage.checkpoint import folders
from orbax_ext.storage.checkpoint.errors import UnfinishedError
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.records import CommitState
from orbax_ext.storage.filenames import COMMIT_FILE, STEP_METADATA, TEMPORARY


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
    if "://" in path and not _is_below_committed(folder):
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


def _is_below_committed(folder: Folder) -> bool:
    """Whether the parent has a commit file: an item of a step need not have one of its own."""
    return COMMIT_FILE in folders.list_folder(folder.path.parent).files
