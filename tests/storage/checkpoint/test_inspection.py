from __future__ import annotations

from typing import Any

import pytest
from etils import epath

from orbax_ext.storage.checkpoint import folders, inspection
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.inspection import UnfinishedError
from orbax_ext.storage.checkpoint.records import step_number

COMMIT = {"commit_success.txt": 10}
TIME = {"commit_timestamp_nsecs": 1}


@pytest.mark.parametrize(
    ("path", "files", "metadata", "because"),
    [
        ("/run/12", {}, {}, "final name"),
        ("/run/12", {}, TIME, "has the time of it"),
        ("/run/12", COMMIT, {}, "commit_success.txt is there"),
        ("gs://bucket/run/12", COMMIT, {}, "commit_success.txt is there"),
    ],
)
def test_a_complete_checkpoint_has_a_sign(
    path: str, files: dict[str, int], metadata: dict[str, Any], because: str
) -> None:
    state = inspection.check_committed(Folder(epath.Path(path), files, ()), metadata)
    assert state.committed
    assert because in state.because


@pytest.mark.parametrize(
    ("path", "files", "metadata", "because"),
    [
        ("/run/12.orbax-checkpoint-tmp-17", COMMIT, TIME, "is in its name"),
        ("/run/12.orbax-checkpoint-tmp/default", {}, {}, "is in its name"),
        ("/run/12", {}, {"commit_timestamp_nsecs": None}, "no time of commit"),
        ("gs://bucket/run/12", {}, TIME, "there is no commit_success.txt"),
    ],
)
def test_an_unfinished_checkpoint_is_refused_with_the_reason(
    path: str,
    files: dict[str, int],
    metadata: dict[str, Any],
    because: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folders, "list_folder", lambda parent: Folder(parent, {}, ()))
    with pytest.raises(UnfinishedError, match=because):
        inspection.check_committed(Folder(epath.Path(path), files, ()), metadata)


def test_an_item_is_committed_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "list_folder", lambda parent: Folder(parent, COMMIT, ()))
    assert inspection.commit_state(Folder(epath.Path("gs://bucket/run/12/default"), {}, ()), {}).committed


@pytest.mark.parametrize(("content", "metadata"), [("{", {}), ("[]", {}), ("", {}), ('{"a": 1}', {"a": 1})])
def test_damaged_metadata_of_a_step_counts_as_none(tmp_path: epath.Path, content: str, metadata: Any) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text(content)
    assert inspection.step_metadata(folders.list_folder(epath.Path(tmp_path))) == metadata


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("1200", 1200),
        ("step_00001200", 1200),
        ("12.orbax-checkpoint-tmp-1700000000", 12),
        ("default", None),
        ("params_v", None),
    ],
)
def test_the_number_of_a_step_is_in_its_name(name: str, number: int | None) -> None:
    assert step_number(name) == number
