"""Real clients: the call shapes of known trainers, and training loops that are killed and resume."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import signal
import time

import pytest

from orbax_ext import lab
from tests.support import call_shapes, plain, trainers, world

STEPS, SAVE_AT = 6, 3


@pytest.fixture(scope="module")
def checkpoint(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("call_shapes") / "checkpoint")
    cluster.run(call_shapes.save, path)
    return path


@pytest.mark.parametrize("name", call_shapes.SHAPES)
def test_our_handler_is_a_one_word_replacement_in(cluster: lab.Cluster, checkpoint: str, name: str) -> None:
    found = cluster.run(call_shapes.compare, checkpoint, name)
    plain.agreed(found)
    for each in found:
        assert each.errors == ((), ()), each.messages
        assert world.ways(each.strategy) <= {"single", "spread"}
        assert len(each.strategy) == len(world.STATE)


@pytest.mark.parametrize("name", call_shapes.SHAPES)
def test_with_the_stock_handler_the_same_calls_change_the_data_or_fail(
    cluster: lab.Cluster, checkpoint: str, name: str
) -> None:
    found = cluster.run(call_shapes.compare, checkpoint, name, "stock")
    assert all("['mask']: dtype int32, not bool" in each.differences or each.errors[1] for each in found)


@dataclasses.dataclass(frozen=True)
class Histories:
    """What each process says of each trainer: before its job was killed, and after it was started again."""

    before: list[dict[str, trainers.History]]
    after: list[dict[str, trainers.History]]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """A job that goes on undisturbed after its checkpoint and is killed then, and one that starts from there."""
    path = tmp_path_factory.mktemp("trainers")
    notes = [path / f"notes{rank}" for rank in range(4)]
    with lab.Cluster(processes=4, devices=2) as running:
        run = running.submit(trainers.train_all, str(path), STEPS, SAVE_AT, notes=str(path / "notes"))
        _wait_for(notes)
        before = running.pids
        for rank in range(4):
            running.signal(rank, signal.SIGKILL)
        assert [outcome.state for outcome in run.outcomes(60)] == ["died"] * 4
        after = running.run(trainers.train_all, str(path), STEPS, SAVE_AT, timeout=240)
        assert not set(before) & set(running.pids)
    return Histories([pickle.loads(note.read_bytes()) for note in notes], after)


@pytest.mark.parametrize("kind", trainers.TRAINERS)
def test_a_killed_job_resumes_with_the_losses_of_one_that_was_not(histories: Histories, kind: str) -> None:
    for before, after in zip(histories.before, histories.after, strict=True):
        whole, rest = before[kind], after[kind]
        assert (whole.start, rest.start) == (0, SAVE_AT)
        assert rest.losses == {step: loss for step, loss in whole.losses.items() if step >= SAVE_AT}
        assert len(set(whole.losses.values())) == STEPS
        assert {"single", "spread"} & world.ways(rest.strategy)


def _wait_for(files: list[pathlib.Path], limit: float = 240.0) -> None:
    deadline = time.monotonic() + limit
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"no sign of {[file.name for file in files if not file.exists()]}"
        time.sleep(0.05)
