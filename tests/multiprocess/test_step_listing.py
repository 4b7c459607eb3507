"""Process 0 lists the steps for all: over the coordination service, with a limit."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.path import step as step_lib

from orbax_ext import lab
from orbax_ext.meeting import listing
from orbax_ext.meeting.session import Limits
from orbax_ext.upstream import hooks, steps
from tests.support import states

NAMES = [1, 2, 30]


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Cluster]:
    with lab.Cluster(2, 1) as running:
        yield running


@pytest.fixture
def directory(path: str) -> str:
    for name in NAMES:
        pathlib.Path(path, str(name), "default").mkdir(parents=True)
    return path


def test_a_listing_error_on_process_0_hangs_the_others_with_stock_orbax_only(pair: lab.Cluster, directory: str) -> None:
    for outcome in pair.outcomes(list_steps, directory, hooked=True, failing=True, timeout=120):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 0 (" in str(outcome)
        assert "in phase 'list steps': PermissionError: no entry" in str(outcome)
    assert pair.run(list_steps, directory, hooked=True) == [(NAMES, 1)] * 2
    assert pair.run(states.coordination_keys) == [[]] * 2
    with lab.Cluster(2, 1) as stock:
        first, second = stock.submit(list_steps, directory, failing=True).outcomes(timeout=60, grace=3)
        assert "PermissionError: no entry" in str(first)
        assert second.state == "timed out"


def test_steps_are_the_same_as_with_stock_orbax(pair: lab.Cluster, directory: str) -> None:
    assert pair.run(list_steps, directory) == [(NAMES, 0)] * 2
    assert pair.run(list_steps, directory, hooked=True) == [(NAMES, 1)] * 2
    assert pair.run(list_steps, directory) == [(NAMES, 0)] * 2  # the hook is gone
    assert pair.run(list_with_manager, directory) == [NAMES] * 2


def test_more_steps_than_one_message_holds_are_listed(pair: lab.Cluster, path: str) -> None:
    many = [10**12 + number for number in range(5000)]
    for name in many:
        pathlib.Path(path, str(name)).mkdir(parents=True)
    for listed, _ in pair.run(list_steps, path, hooked=True):
        assert listed == many


def test_a_process_that_does_not_list_is_named(pair: lab.Cluster, directory: str) -> None:
    first, second = pair.outcomes(list_steps, directory, hooked=True, absent=1)
    assert "RestoreTimeoutError" in str(first)
    assert "process 1" in str(first)
    assert second.value == ([], 0)


def test_silent_storage_of_process_0_is_everybodys_error(pair: lab.Cluster, directory: str) -> None:
    first, second = pair.outcomes(list_steps, directory, hooked=True, silent=True)
    assert "could not list steps within" in str(first)
    for outcome in (first, second):  # the second may have begun, and so given up, earlier
        assert outcome.state == "raised"
        assert "process 0" in str(outcome)


# Run on the processes.


def list_steps(
    path: str, hooked: bool = False, failing: bool = False, silent: bool = False, absent: int | None = None
) -> tuple[list[int], int]:
    """Returns the steps that a manager lists, and how often the hook did that."""
    if jax.process_index() == absent:
        return [], 0
    calls = []

    def share(list_numbers: Any) -> list[int]:
        calls.append(list_numbers)
        return listing.from_process_0(list_numbers, Limits(3 if silent or absent is not None else 60))

    undo = hooks.install(steps.HOOKS, share) if hooked else None
    try:
        effect = PermissionError("no entry") if failing else (lambda *_: time.sleep(60)) if silent else None
        with fault(effect) if effect and jax.process_index() == 0 else contextlib.nullcontext():
            name_format = step_lib.standard_name_format(single_host_load_and_broadcast=True)
            return sorted(found.step for found in name_format.find_all(path)), len(calls)
    finally:
        if undo is not None:
            undo()


def list_with_manager(path: str) -> list[int]:
    options = ocp.CheckpointManagerOptions(single_host_load_and_broadcast=True)
    undo = hooks.install(steps.HOOKS, lambda list_numbers: listing.from_process_0(list_numbers, Limits(60)))
    collective = mock.patch("jax.experimental.multihost_utils.broadcast_one_to_all", side_effect=AssertionError)
    try:
        with collective, ocp.CheckpointManager(path, options=options) as manager:
            return list(manager.all_steps())
    finally:
        undo()


def fault(effect: Any) -> Any:
    kind = type(step_lib.standard_name_format())
    return mock.patch.object(kind, "_glob_step_paths", side_effect=effect)
