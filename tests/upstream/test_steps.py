from __future__ import annotations

import pathlib
import types

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.path import atomicity

from orbax_ext.upstream import steps


def make_manager(directory: pathlib.Path, commit_file: bool, **options: object) -> ocp.CheckpointManager:
    path_class = atomicity.CommitFileTemporaryPath if commit_file else None
    return ocp.CheckpointManager(
        directory, options=ocp.CheckpointManagerOptions(temporary_path_class=path_class, **options)
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("1", "2")),
        ({"step_prefix": "run"}, ("run_1", "run_2")),
        ({"step_format_fixed_length": 6}, ("000001", "000002")),
    ],
)
def test_steps_without_a_commit_file_are_found(
    tmp_path: pathlib.Path, options: dict[str, object], names: tuple[str, str]
) -> None:
    for name in (*names, "2.orbax-checkpoint-tmp-7", "other3"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").touch()
    (tmp_path / names[0] / steps.COMMIT_FILE).touch()
    with make_manager(tmp_path, commit_file=True, **options) as manager:
        assert steps.steps_without_commit(manager, [1]) == [2]
        assert steps.steps_without_commit(manager, [1, 2]) == [2]
    with make_manager(tmp_path, commit_file=False, **options) as manager:
        assert steps.steps_without_commit(manager, [1, 2]) == []


def test_another_kind_of_manager_has_none() -> None:
    assert steps.steps_without_commit(types.SimpleNamespace(directory="/nowhere"), [1]) == []


def test_every_hook_exists() -> None:
    assert all(hook.exists for hook in steps.HOOKS)
