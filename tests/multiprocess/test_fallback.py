"""All processes choose the same newest valid step, and one process's error is raised by all."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pathlib
import shutil
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.path import atomicity

import orbax_ext
from orbax_ext import lab
from orbax_ext.request import make_request
from tests.support import fault_injection, states
from tests.support.states import MeshSpec, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
KNOBS: dict[str, Any] = {"replica_axis": "dp", "strategy": "single", "stall_timeout": 20}


@pytest.fixture(scope="module")
def team(small_cluster: lab.Cluster) -> lab.Cluster:
    return small_cluster


@pytest.fixture(scope="module")
def saved_steps(team: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with steps 1, 2 and 3, saved once. No test may write to it."""
    path = str(tmp_path_factory.mktemp("steps") / "checkpoint")
    team.run(save_steps, path, [1, 2, 3])
    return path


@pytest.fixture
def steps(saved_steps: str, path: str) -> str:
    """A directory of the test's own with steps 1, 2 and 3."""
    shutil.copytree(saved_steps, path)
    return path


def test_the_newest_step_is_taken_when_it_is_valid(team: lab.Cluster, steps: str) -> None:
    assert team.run(restore_latest, steps) == [(3, {}, [])] * 4


def test_a_step_that_only_the_reader_finds_damaged_is_skipped_by_all(team: lab.Cluster, steps: str) -> None:
    for data in pathlib.Path(steps, "3").rglob("d/*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    for step, skipped, differences in team.run(restore_latest, steps):
        assert (step, differences) == (2, [])
        assert list(skipped) == [3]
        assert "process 0 (" in skipped[3]


def test_a_step_that_one_process_lacks_is_skipped_by_all(team: lab.Cluster, steps: str) -> None:
    for step, skipped, differences in team.run(restore_latest, steps, lacking={2: 3}):
        assert (step, differences) == (2, [])
        assert "process 2 (" in skipped[3]
        assert "FileNotFoundError" in skipped[3]
    assert team.run(restore_latest, steps) == [(3, {}, [])] * 4  # no message of the failed restore is left
    assert team.run(states.coordination_keys) == [[]] * 4


def test_the_error_names_all_steps_when_none_is_valid(team: lab.Cluster, steps: str) -> None:
    for step in ("1", "2", "3"):
        shutil.rmtree(pathlib.Path(steps, step, "default", "d"))
        shutil.rmtree(pathlib.Path(steps, step, "default", "ocdbt.process_0"), ignore_errors=True)
    texts = {str(outcome.failure) for outcome in team.outcomes(restore_latest, steps)}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith("RestoreError: tried 3 steps in ")
    assert all(f"step {step}: restore failed on" in text for step in (1, 2, 3))


def test_a_step_without_its_commit_file_is_skipped(team: lab.Cluster, path: str) -> None:
    """Such a step was handed out after a slice had died (AI-Hypercomputer/maxtext #5260)."""
    team.run(save_steps, path, [1, 2, 3], commit_file=True)
    for latest, (step, skipped, differences) in team.run(lose_commit_file, path, 3):
        assert latest == 3  # stock Orbax hands it out
        assert (step, differences) == (2, [])
        assert skipped == {3: "its commit file commit_success.txt is missing: the save of this step did not finish"}
    assert pathlib.Path(path, "3").exists()
    for step, skipped, differences in team.run(restore_latest, path, commit_file=True, steps=[3, 1]):
        assert (step, list(skipped), differences) == (1, [3], [])


def test_steps_of_another_manager_are_found_and_deleted_steps_forgotten(team: lab.Cluster, steps: str) -> None:
    stock, ours = zip(*team.run(restore_after_another_job, steps), strict=True)
    assert stock == ([1, 2, 3],) * 4
    assert ours == ((4, {}, []),) * 4


def test_steps_that_one_process_cannot_list_are_everybodys_error(team: lab.Cluster, steps: str) -> None:
    for outcome in team.outcomes(fail_to_list, steps, 2):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 2 (" in str(outcome)
        assert "in phase 'list steps': PermissionError: no entry" in str(outcome)
    assert team.run(restore_latest, steps) == [(3, {}, [])] * 4


def test_a_failure_before_the_first_meeting_is_raised_by_all(team: lab.Cluster, steps: str) -> None:
    outcomes = team.outcomes(fail_to_describe, steps, 3)
    for outcome in outcomes:
        assert "RestoreFailedError" in str(outcome)
        assert "process 3 (" in str(outcome)
        assert "in phase 'describe': OSError: no metadata here" in str(outcome)


@pytest.mark.parametrize("slow", [[0], [1, 2, 3], []], ids=["0 is slow", "0 waits", "all wait"])
def test_a_restore_that_another_handler_ends_does_not_disturb_the_next(
    team: lab.Cluster, path: str, slow: list[int]
) -> None:
    """When a handler fails, Orbax closes the event loop under the others, from 0.12.0 on without an error there."""
    for step, skipped, differences in team.run(fall_back_from_another_handler, path, slow):
        assert (step, differences) == (1, [])
        assert "OSError: no such number" in skipped[2]
    assert team.run(states.coordination_keys) == [[]] * 4


def test_different_trees_are_refused_and_the_leaf_is_named(team: lab.Cluster, steps: str) -> None:
    for outcome in team.outcomes(restore_another_tree, steps, 2):
        assert "PlanMismatchError" in str(outcome)
        assert "process 2 (" in str(outcome)
        assert "has 'bias' as float32[12] sharded (-) on mesh (dp=4, tp=2), not float32[24]" in str(outcome)
    assert team.run(restore_latest, steps) == [(3, {}, [])] * 4


def test_a_failed_exchange_is_raised_by_all_and_the_next_restore_works(team: lab.Cluster, steps: str) -> None:
    for rank in (0, 1):
        for outcome in team.outcomes(fail_in_exchange, steps, rank):
            assert "RestoreFailedError" in str(outcome)
            assert f"process {rank} (" in str(outcome)
            assert "MemoryError: no room" in str(outcome)
        assert team.run(restore_latest, steps) == [(3, {}, [])] * 4


# Run on the processes.


def save_steps(path: str, steps: list[int], commit_file: bool = False) -> None:
    state = states.make_state(states.STATE, MESH.make())
    with make_manager(path, commit_file) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.PyTreeSave(state))
            manager.wait_until_finished()


def make_manager(path: str, commit_file: bool = False) -> ocp.CheckpointManager:
    """Returns a manager. With `commit_file` a step is complete when that file is there, as on object stores."""
    path_class = atomicity.CommitFileTemporaryPath if commit_file else None
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(temporary_path_class=path_class))


def restore_latest(
    path: str, lacking: dict[int, int] | None = None, commit_file: bool = False, steps: list[int] | None = None
) -> tuple[int, Any, list[str]]:
    """Restores the newest valid step. `lacking` maps a process to the step that is missing on its disk."""
    missing = (lacking or {}).get(jax.process_index())
    with orbax_ext.registered(**KNOBS), make_manager(path, commit_file) as manager:
        original = manager.restore

        def restore(step: int, *args: Any, **kwargs: Any) -> Any:
            if step == missing:
                raise FileNotFoundError(f"No step {step} found")
            return original(step, *args, **kwargs)

        manager.restore = restore
        return latest_valid(manager, steps)


def latest_valid(manager: ocp.CheckpointManager, steps: list[int] | None = None) -> tuple[int, Any, list[str]]:
    latest = orbax_ext.restore_latest_valid(manager, restore_args(states.STATE), steps=steps, stall_timeout=30)
    return latest.step, dict(latest.skipped), states.differences(latest.state, states.STATE, MESH.make())


def lose_commit_file(path: str, step: int) -> tuple[int | None, tuple[int, Any, list[str]]]:
    """Returns the manager's newest step after its commit file was lost, and the newest valid one."""
    with orbax_ext.registered(**KNOBS), make_manager(path, commit_file=True) as manager:
        orbax_ext.barrier("before")
        if jax.process_index() == 0:
            pathlib.Path(path, str(step), "commit_success.txt").unlink()
        orbax_ext.barrier("after")
        return manager.latest_step(), latest_valid(manager)


def restore_after_another_job(path: str) -> tuple[list[int], tuple[int, Any, list[str]]]:
    """Returns the manager's steps after another manager has changed them, and the newest valid one."""
    with orbax_ext.registered(**KNOBS), make_manager(path) as manager:
        save_steps(path, [4])
        orbax_ext.barrier("before")
        if jax.process_index() == 0:
            shutil.rmtree(pathlib.Path(path, "3"))
        orbax_ext.barrier("after")
        return list(manager.all_steps()), latest_valid(manager)


def fail_to_list(path: str, rank: int) -> None:
    with orbax_ext.registered(**KNOBS), make_manager(path) as manager:
        failing = mock.patch.object(manager, "reload", side_effect=PermissionError("no entry"))
        with failing if jax.process_index() == rank else contextlib.nullcontext():
            latest_valid(manager)


def restore_args(specs: dict[str, Spec]) -> Any:
    abstract = states.abstract_state(specs, MESH.make())
    return ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract, strict=False))


def fail_to_describe(path: str, rank: int) -> None:
    async def describe(*args: Any) -> Any:
        if jax.process_index() == rank:
            raise OSError("no metadata here")
        return await make_request(*args)

    with mock.patch("orbax_ext.handler.make_request", describe):
        restore_latest_step(path)


def fall_back_from_another_handler(path: str, slow: list[int]) -> tuple[int, Any, list[str]]:
    """Restores step 1, because Orbax's handler of numbers fails in step 2 while processes still describe the arrays."""
    state = {**states.make_state(states.STATE, MESH.make()), "count": 3}
    ended: list[str] = []
    read_numbers = ocp.type_handlers.ScalarHandler.deserialize

    async def fail_first(*args: Any, **kwargs: Any) -> Any:
        if ended:
            return await read_numbers(*args, **kwargs)
        await asyncio.sleep(1)
        ended.append("step 2")
        raise OSError("no such number")

    async def describe(*args: Any) -> Any:
        if not ended and jax.process_index() in slow:
            await asyncio.sleep(60)
        gc.collect()  # of what the failed restore has left
        return await make_request(*args)

    with make_manager(path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.PyTreeSave(state))
            manager.wait_until_finished()
        with (
            orbax_ext.registered(**KNOBS),
            mock.patch.object(ocp.type_handlers.ScalarHandler, "deserialize", fail_first),
            mock.patch("orbax_ext.handler.make_request", describe),
        ):
            abstract = {**states.abstract_state(states.STATE, MESH.make()), "count": 0}
            args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
            latest = orbax_ext.restore_latest_valid(manager, args, stall_timeout=30)
    arrays = {name: latest.state[name] for name in states.STATE}
    return latest.step, dict(latest.skipped), states.differences(arrays, states.STATE, MESH.make())


def restore_another_tree(path: str, rank: int) -> None:
    specs = {**states.STATE, "bias": Spec((12,), "float32")} if jax.process_index() == rank else states.STATE
    restore_latest_step(path, specs)


def fail_in_exchange(path: str, rank: int) -> None:
    with fault_injection.on(rank, lambda: fault_injection.exception_in_exchange("ours")):
        restore_latest_step(path)


def restore_latest_step(path: str, specs: dict[str, Spec] = states.STATE) -> None:
    with orbax_ext.registered(**KNOBS), ocp.CheckpointManager(path) as manager:
        manager.restore(3, args=restore_args(specs))
