"""All meet for the next exchange while the one before travels, and all carry out what was agreed on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import pytest

from orbax_ext import lab
from orbax_ext.transfer.collectives import Exchange
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.pipeline import Pipeline
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MIB = 1 << 20
MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {f"layer_{number}": Spec((1024, 512), "float32", P("tp")) for number in range(6)}
GROUPS = len(STATE)
KNOBS = {"stall_timeout": 60, "late_seconds": math.inf}
LIMITS = {"spread": 4 * MIB, "single": 5 * MIB}  # of memory: a leaf is a group
PATIENCE = 30.0  # seconds that an exchange waits for the next one to be agreed on


pytestmark = pytest.mark.once


@dataclasses.dataclass
class Seen:
    """What one process has done in a restore in which no exchange ends before the next one is agreed on."""

    exchanges: list[tuple[float, float]]  # when each began and ended
    meetings: dict[int, float]  # when the meeting for each exchange began
    waited_in_vain: list[int]  # exchanges that ended because the next one was not agreed on
    groups_under_way: int  # the most at a time: being read, read, or travelling


@pytest.fixture(scope="module")
def saved(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("overlap") / "checkpoint")
    small_cluster.run(states.save, path, STATE, MESH)
    return path


@pytest.mark.parametrize(("strategy", "most"), [("spread", 4), ("single", 3)])
def test_all_meet_while_the_group_before_travels(
    small_cluster: lab.Cluster, saved: str, strategy: str, most: int
) -> None:
    for seen in small_cluster.run(restore_with_exchanges_that_wait, saved, strategy):
        assert seen.waited_in_vain == []
        assert len(seen.exchanges) == GROUPS
        for group in range(1, GROUPS):
            assert seen.meetings[group] < seen.exchanges[group - 1][1]
            assert seen.exchanges[group - 1][1] <= seen.exchanges[group][0]  # one travels at a time
        assert seen.groups_under_way <= most  # as many as the memory limit has room for


def test_an_exchange_that_fails_after_the_next_was_agreed_on_is_everybodys_error(
    small_cluster: lab.Cluster, saved: str
) -> None:
    for failure, wrong in small_cluster.run(fail_and_restore_again, saved):
        assert "restore failed on 1 process:\n  process 2 (" in failure
        assert "MemoryError: no room for the exchange" in failure
        assert wrong == []  # all have taken part in the same exchanges: the next restore finds its way


# Run on the processes.


def knobs(strategy: str) -> dict[str, Any]:
    return {**KNOBS, "strategy": strategy, "broadcast_memory_limit_bytes": LIMITS[strategy]}


class Agreed:
    """The exchanges that all have agreed on, by number."""

    def __init__(self) -> None:
        self._events = [threading.Event() for _ in range(GROUPS)]

    def wait(self, number: int) -> bool:
        return number >= GROUPS or self._events[number].wait(PATIENCE)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        start = Pipeline.start_exchange

        def start_and_note(pipeline: Pipeline) -> None:
            number = pipeline.course.ends.front
            start(pipeline)
            self._events[number].set()

        with mock.patch.object(Pipeline, "start_exchange", start_and_note):
            yield


def restore_with_exchanges_that_wait(path: str, strategy: str) -> Seen:
    agreed, late = Agreed(), []
    begun = started = ended = most = 0
    read, start_exchange = Executor.read, Executor.start_exchange

    async def read_and_count(*args: Any) -> Any:
        nonlocal begun, most
        begun += 1
        most = max(most, begun - ended)
        return await read(*args)

    def start_and_wait(*args: Any) -> Any:
        nonlocal started
        started += 1
        number = started

        async def finish() -> Any:
            nonlocal ended
            arrays = await start_exchange(*args)
            if not await asyncio.to_thread(agreed.wait, number):
                late.append(number)
            ended += 1
            return arrays

        return asyncio.ensure_future(finish())

    replaced = mock.patch.multiple(Executor, read=read_and_count, start_exchange=start_and_wait)
    with replaced, agreed.noted():
        spans = states.restore_exactly(path, knobs(strategy), STATE, MESH).own.spans
    exchanges = sorted((span.start, span.end) for span in spans if span.phase == "exchange")
    phases = {f"read group {number + 1} of {GROUPS}": number for number in range(GROUPS)}
    meetings = {phases[span.note]: span.start for span in spans if span.phase == "wait" and span.note in phases}
    return Seen(exchanges, meetings, late, most)


def fail_and_restore_again(path: str) -> tuple[str, list[str]]:
    agreed, calls, start = Agreed(), 0, Exchange._start

    def fail_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and jax.process_index() == 2:  # the second exchange: the first collective only connects
            assert agreed.wait(2)
            raise MemoryError("no room for the exchange")
        return start(*args)

    failure = ""
    with mock.patch.object(Exchange, "_start", fail_once), agreed.noted():
        try:
            states.restore(path, STATE, MESH, knobs=knobs("spread"))
        except Exception as error:
            failure = str(error)
    return failure, states.restore(path, STATE, MESH, knobs=knobs("spread"))
