"""Whether a checkpoint is complete: by its name, by a file that is written last, or by a time in its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from orbax_ext.storage.checkpoint import folders
from orbax_ext.storage.checkpoint.errors import UnfinishedError
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.records import TEMPORARY, State

STEP = "_CHECKPOINT_METADATA"
_COMMIT = "commit_success.txt"


def record_of(folder: Folder) -> Mapping[str, Any]:
    try:
        found = json.loads(folder.text(STEP) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def state_of(folder: Folder, record: Mapping[str, Any]) -> State:
    """A checkpoint becomes complete by a rename, or where there is none by a file that is written last."""
    path = os.fspath(folder.path)
    if TEMPORARY in path:
        return State(False, f"its save was interrupted or is under way ({TEMPORARY} is in its name)")
    if _COMMIT in folder.files:
        return State(True, f"{_COMMIT} is there")
    if "://" in path and not _is_below_committed(folder):
        return State(False, f"its save was interrupted or is under way (there is no {_COMMIT})")
    if record and not record.get("commit_timestamp_nsecs"):
        return State(False, f"its save was interrupted or is under way (no time of commit in {STEP})")
    return State(True, f"{STEP} has the time of it" if record else "it has its final name")


def check_committed(folder: Folder, record: Mapping[str, Any]) -> State:
    state = state_of(folder, record)
    if not state.committed:
        raise UnfinishedError(f"{os.fspath(folder.path)} is not a complete checkpoint: {state.because}")
    return state


def _is_below_committed(folder: Folder) -> bool:
    """An item of a step need not have a commit file of its own."""
    return _COMMIT in folders.look(folder.path.parent).files
