"""Whatever a job does with its checkpoints, the step that comes back, and its bytes, are those of a simple model.

Hypothesis draws what the job does; a failure shrinks to the shortest job that still fails, printed as calls.
`make test` tries a few jobs, the same every time; `make test-property EXAMPLES=300` as many new ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from orbax_ext import lab
from orbax_ext.cli import main
from tests.support import file_damage, job

EXAMPLES = int(os.environ.get("ORBAX_EXT_EXAMPLES", "0"))
PROCESSES = 2
STRATEGIES = ["auto", "spread", "single", "direct"]

_numbers = itertools.count()


@dataclasses.dataclass
class Step:
    """What is known of a step on disk."""

    holds: dict[str, tuple[int, str]]  # for each leaf: the save that wrote its bytes, and as which leaf
    readable: bool = True
    digests: dict[str, tuple[int, str]] | None = None  # what it held when its digests were written


class Job(stateful.RuleBasedStateMachine):
    """A job that saves, restores, loses and damages steps, and starts again."""

    steps = stateful.Bundle("steps")

    def __init__(self, cluster: lab.Cluster, home: pathlib.Path) -> None:
        super().__init__()
        self.cluster = cluster
        self.path = home / f"job{next(_numbers)}"
        self.disk: dict[int, Step] = {}
        self.listed: set[int] = set()  # the steps that the manager knows
        self.registered = self.verifies = False
        self.saves = 0

    @stateful.initialize(form=st.sampled_from(list(job.FORMS)))
    def begin(self, form: str) -> None:
        self.form = form
        self.cluster.run(job.open_manager, str(self.path), form)

    @stateful.rule(strategy=st.sampled_from(STRATEGIES), verify=st.booleans())
    def register(self, strategy: str, verify: bool) -> None:
        self.cluster.run(job.register, {"strategy": strategy, "verify": verify})
        self.registered, self.verifies = True, verify

    @stateful.rule()
    def unregister(self) -> None:
        self.cluster.run(job.unregister)
        self.registered = self.verifies = False

    @stateful.rule(target=steps)
    def save(self) -> int:
        step = self._next()
        self.cluster.run(job.save, step, self.saves)
        self.disk[step] = Step({name: (self.saves, name) for name in job.SPECS})
        self.listed.add(step)
        return step

    @stateful.rule(step=stateful.consumes(steps))
    def delete(self, step: int) -> None:
        self.cluster.run(job.delete, step)
        del self.disk[step]
        self.listed.remove(step)

    @stateful.rule(step=stateful.consumes(steps))
    def delete_behind_the_manager(self, step: int) -> None:
        shutil.rmtree(self.path / str(step))
        del self.disk[step]

    @stateful.rule(step=steps)
    def cut_arrays(self, step: int) -> None:
        for file in self._array_files(step):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        self.disk[step].readable = False

    @stateful.precondition(lambda self: self.form != "OCDBT")
    @stateful.rule(step=steps)
    def exchange_arrays(self, step: int) -> None:
        """Gives two arrays each other's files, which no storage notices."""
        left, right, other = (self.path / str(step) / "default" / name for name in ("left", "right", "other"))
        left.rename(other)
        right.rename(left)
        other.rename(right)
        holds = self.disk[step].holds
        holds["left"], holds["right"] = holds["right"], holds["left"]

    @stateful.rule(step=steps)
    def empty_sharding_file(self, step: int) -> None:
        """Changes nothing: the restore says which shardings it wants."""
        (self.path / str(step) / "default" / "_sharding").write_bytes(b"")

    @stateful.rule(step=steps)
    def write_digests(self, step: int) -> None:
        assert main.main(["verify", "--write", str(self.path), "--step", str(step)]) == int(
            not self.disk[step].readable
        )
        if self.disk[step].readable:
            self.disk[step].digests = dict(self.disk[step].holds)

    @stateful.rule(step=steps)
    def restore(self, step: int) -> None:
        outcomes = self.cluster.outcomes(job.restore, step)
        if self._fails(step):
            self._check_failures(outcomes)
        else:
            self._check_restored(step, outcomes)

    @stateful.precondition(lambda self: self.registered)
    @stateful.rule(step=steps, number=st.integers(0, 20))
    def restore_while_one_file_is_cut(self, step: int, number: int) -> None:
        """Plain Orbax fails on the processes that need the file only, and the others wait for them."""
        files = sorted(self._array_files(step))
        file = files[number % len(files)]
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        outcomes = self.cluster.outcomes(job.restore, step)
        file.write_bytes(content)
        if not self._fails(step) and all(outcome.ok for outcome in outcomes):  # no leaf is in that file
            self._check_restored(step, outcomes)
        else:
            self._check_failures(outcomes)

    @stateful.rule()
    def restore_latest_valid(self) -> None:
        outcomes = self.cluster.outcomes(job.restore_latest_valid)
        self.listed = set(self.disk)  # it reloads the manager
        newest_first = sorted(self.disk, reverse=True)
        good = next((step for step in newest_first if not self._fails(step)), None)
        if good is None:
            texts = {str(outcome.failure) for outcome in outcomes}
            assert len(texts) == 1
            assert texts.pop().startswith("RestoreError: ")
            return
        skipped = newest_first[: newest_first.index(good)]
        for rank, outcome in enumerate(outcomes):
            assert outcome.ok, str(outcome)
            assert outcome.value == (good, self._digests(good, rank), skipped)

    @stateful.precondition(lambda self: self.disk)
    @stateful.rule(saving=st.booleans())
    def kill_and_restart(self, saving: bool) -> None:
        """Kills the last process, perhaps while all save; as a launcher would, ends the others and starts all again."""
        if saving:
            run = self.cluster.submit(job.die_in_save, self._next(), self.saves)
            assert run.outcomes(grace=0)[PROCESSES - 1].exit_code == 9
        for rank in range(PROCESSES) if self.cluster.running else ():
            self.cluster.signal(rank, signal.SIGKILL)
        self.cluster.stop()
        self.cluster.run(job.open_manager, str(self.path), self.form)
        self.listed = set(self.disk)
        self.registered = self.verifies = False

    @stateful.invariant()
    def the_manager_lists_its_steps(self) -> None:
        if hasattr(self, "form"):
            latest = max(self.listed, default=None)
            assert self.cluster.run(job.steps) == [(latest, sorted(self.listed))] * PROCESSES

    def teardown(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _next(self) -> int:
        """Returns the number of the next step: that of the last one, if it was deleted."""
        self.saves += 1
        return max(self.listed | self.disk.keys(), default=0) + 1

    def _array_files(self, step: int) -> list[pathlib.Path]:
        item = self.path / str(step) / "default"
        if self.form == "OCDBT":
            return file_damage.data_files(str(item))
        return [
            file
            for name in job.SPECS
            for file in (item / name).rglob("*")
            if file.name[0].isdigit() or file.name == "c"
        ]

    def _check_restored(self, step: int, outcomes: list[lab.Outcome]) -> None:
        for rank, outcome in enumerate(outcomes):
            assert outcome.ok, str(outcome)
            ours, digests = outcome.value
            assert ours == self.registered
            assert digests == self._digests(step, rank)

    def _check_failures(self, outcomes: list[lab.Outcome]) -> None:
        assert {outcome.state for outcome in outcomes} == {"raised"}, outcomes
        if self.registered:
            texts = {str(outcome.failure) for outcome in outcomes}
            assert len(texts) == 1, texts
            assert "RestoreTimeoutError" not in texts.pop()

    def _fails(self, step: int) -> bool:
        known = self.disk[step]
        changed = known.digests is not None and known.digests != known.holds
        return not known.readable or (self.verifies and changed)

    def _digests(self, step: int, rank: int) -> dict[str, str]:
        """Returns the digests of what a process must get."""
        digests = {}
        for leaf, (save, name) in self.disk[step].holds.items():
            array = job.content(save)[name]
            if leaf == "own":
                rows = len(array) // PROCESSES
                array[: rank * rows] = array[(rank + 1) * rows :] = 0
            digests[leaf] = job.digest(array)
        return digests


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Cluster]:
    with lab.Cluster(processes=PROCESSES, devices=2, timeout=90) as running:
        yield running


@pytest.mark.property
def test_any_job_gets_back_the_step_that_it_must(pair: lab.Cluster, tmp_path: pathlib.Path) -> None:
    settings = hypothesis.settings(
        max_examples=EXAMPLES or 5,
        stateful_step_count=15,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    begin: Any = functools.partial(Job, pair, tmp_path)
    stateful.run_state_machine_as_test(begin, settings=settings)


# Jobs that once failed.


def test_digests_of_a_deleted_step_do_not_count_for_the_next_of_the_same_number(
    pair: lab.Cluster, tmp_path: pathlib.Path
) -> None:
    done = Job(pair, tmp_path)
    done.begin(form="zarr2 files")
    step = done.save()
    done.write_digests(step=step)
    done.delete(step=step)
    assert done.save() == step
    done.register(strategy="auto", verify=True)
    done.restore(step=step)
