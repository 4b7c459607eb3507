"""Restores as known trainers call them, and training loops that are killed and resume."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import signal
import time

import pytest

from orbax_ext import lab
from tests.support import states, trainer_calls, trainers

STEPS, SAVE_AT = 6, 3


@pytest.fixture(scope="module")
def checkpoint(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("trainer_calls") / "checkpoint")
    cluster.run(trainer_calls.save, path)
    return path


@pytest.mark.core
@pytest.mark.parametrize("under_mesh", [False, True], ids=["no mesh", "set_mesh"])
@pytest.mark.parametrize("name", trainer_calls.TRAINERS)
def test_after_register_an_unchanged_trainer_restores_through_orbax_ext(
    cluster: lab.Cluster, checkpoint: str, name: str, under_mesh: bool
) -> None:
    for outcome in cluster.run(trainer_calls.run, checkpoint, name, "registered", under_mesh):
        assert outcome.differences == []
        assert set(outcome.strategies) == {"spread"}
        assert outcome.served_by == trainer_calls.TRAINERS[name].served_by
        assert outcome.handler == "ArrayHandler"


@pytest.mark.parametrize("name", [name for name in trainer_calls.TRAINERS if name != "checkpointer_made_before"])
def test_without_register_the_same_trainer_gets_other_data(cluster: lab.Cluster, checkpoint: str, name: str) -> None:
    for outcome in cluster.run(trainer_calls.run, checkpoint, name, "stock"):
        assert "mask: dtype int32, not bool" in outcome.differences
        assert any(text.startswith("quantized: dtype int32, not int8") for text in outcome.differences)


def test_without_register_a_trainer_that_goes_on_can_not_save(cluster: lab.Cluster, checkpoint: str) -> None:
    run = cluster.submit(trainer_calls.run, checkpoint, "checkpointer_made_before", "stock")
    assert any("No ArrayMetadata found" in str(outcome) for outcome in run.outcomes(grace=2))


@pytest.mark.parametrize("name", ["maxtext", "axlearn"])
def test_our_handler_is_a_one_word_replacement_in(cluster: lab.Cluster, checkpoint: str, name: str) -> None:
    for outcome in cluster.run(trainer_calls.run, checkpoint, name, "word swapped"):
        assert outcome.differences == []
        assert set(outcome.strategies) <= {"single", "spread", "direct"}
        assert outcome.served_by == ""


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
