"""Restores as known trainers call them, and training loops that are killed and resume."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import signal
import time

import pytest

from orbax_ext import lab
from tests.support import plain_orbax, states, trainer_calls, trainers

STEPS, SAVE_AT = 6, 3


@pytest.fixture(scope="module")
def checkpoint(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("trainer_calls") / "checkpoint")
    cluster.run(trainer_calls.save, path)
    return path


@pytest.mark.parametrize("name", trainer_calls.TRAINERS)
def test_our_handler_is_a_one_word_replacement_in(cluster: lab.Cluster, checkpoint: str, name: str) -> None:
    comparisons = cluster.run(trainer_calls.compare, checkpoint, name)
    plain_orbax.assert_restored(comparisons)
    for comparison in comparisons:
        assert set(states.strategy_names(comparison.strategy.values())) <= {"single", "spread"}
        assert len(comparison.strategy) == len(states.STATE)


@pytest.mark.parametrize("name", ["maxtext", "axlearn"])
def test_the_stock_handler_changes_the_data_in(cluster: lab.Cluster, checkpoint: str, name: str) -> None:
    for comparison in cluster.run(trainer_calls.compare, checkpoint, name, "stock"):
        assert comparison.errors == ((), ()), comparison.messages
        assert "['mask']: dtype int32, not bool" in comparison.differences


def test_the_stock_handler_refuses_the_restore_args_of_orbax_p2p(cluster: lab.Cluster, checkpoint: str) -> None:
    for comparison in cluster.run(trainer_calls.compare, checkpoint, "orbax_p2p", "stock"):
        assert comparison.errors == ((), ("ValueError",))
        assert "Must provide `SingleReplicaArrayRestoreArgs`, but got " in comparison.messages[1]


@dataclasses.dataclass(frozen=True)
class Histories:
    """The training histories of each process, before its job was killed and after it was started again."""

    before: list[dict[str, trainers.History]]
    after: list[dict[str, trainers.History]]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """Trains, is killed after the last step, and trains again from the checkpoint of step `SAVE_AT`."""
    path = tmp_path_factory.mktemp("trainers")
    files = [path / f"histories{rank}" for rank in range(4)]
    with lab.Cluster(processes=4, devices=2) as running:
        run = running.submit(trainers.train_all, str(path), STEPS, SAVE_AT, histories=str(path / "histories"))
        _wait_for(files)
        before = running.pids
        for rank in range(4):
            running.signal(rank, signal.SIGKILL)
        assert [outcome.state for outcome in run.outcomes(60)] == ["died"] * 4
        after = running.run(trainers.train_all, str(path), STEPS, SAVE_AT, timeout=240)
        assert not set(before) & set(running.pids)
    return Histories([pickle.loads(file.read_bytes()) for file in files], after)


@pytest.mark.parametrize("framework", trainers.TRAINERS)
def test_a_killed_job_resumes_with_the_losses_of_an_undisturbed_one(histories: Histories, framework: str) -> None:
    for before, after in zip(histories.before, histories.after, strict=True):
        undisturbed, resumed = before[framework], after[framework]
        assert (undisturbed.start, resumed.start) == (0, SAVE_AT)
        assert resumed.losses == {step: loss for step, loss in undisturbed.losses.items() if step >= SAVE_AT}
        assert len(set(undisturbed.losses.values())) == STEPS
        assert {"single", "spread"} & set(states.strategy_names(resumed.strategy.values()))


def _wait_for(files: list[pathlib.Path], limit: float = 240.0) -> None:
    deadline = time.monotonic() + limit
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"missing: {[file.name for file in files if not file.exists()]}"
        time.sleep(0.05)
