"""The simulated service and a real coordination service give the same answers to the same calls."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from orbax_ext.meeting.actions import Action, Count, Delete, Get, Put, Read, Sleep, Steps, Wait
from orbax_ext.meeting.board import Board, Client
from orbax_ext.meeting.driver import run
from orbax_ext.meeting.keys import SubjectKeys
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.terms import Limits
from orbax_ext.upstream.runtime import join_coordination_service, start_coordination_service
from tests.simulation import plans, runs
from tests.simulation.processes import InterruptError
from tests.simulation.real_process import kind_of, named
from tests.simulation.world import Host, Task, World
from tests.support.s3_stores import free_port

Script = Sequence[Action]

# Each scenario has what each client does. Sleeps put the calls of different clients into an order.
SCENARIOS: dict[str, Sequence[Script]] = {
    "a value is set and read": [
        [Put("a/b", {"x": 1}), Get("a/b"), Read("a"), Read("a/b"), Read("nothing"), Get("nothing"), Get("a")],
        [],
    ],
    "a value is replaced": [[Put("a", {"x": 1}), Put("a", {"x": 2}), Get("a")], []],
    "a value that is set once stays": [
        [Put("a", {"x": 1}, once=True), Sleep(1), Get("a")],
        [Sleep(0.5), Put("a", {"x": 2}, once=True), Get("a")],
    ],
    "a plain value can't be set once more": [[Put("a", {"x": 1}), Put("a", {"x": 2}, once=True), Get("a")], []],
    "a key can be set once more after it was deleted": [
        [Put("a", {"x": 1}, once=True), Delete("a"), Put("a", {"x": 2}, once=True), Get("a")],
        [],
    ],
    "a key is deleted with what is below it and nothing else": [
        [
            *(Put(key, {}) for key in ("h/1", "h/1/in", "h/1/reply/x", "h/10", "h/1x", "h/1x/y")),
            Delete("h/1"),
            Read("h"),
            Delete("missing"),
        ],
        [],
    ],
    "a directory is not its neighbours": [[Put("h/1/in", {}), Put("h/10/in", {}), Read("h/1"), Read("h")], []],
    "a counter counts for all": [
        [Count("n"), Sleep(1), Count("n"), Get("n"), Delete("n"), Count("n")],
        [Sleep(0.5), Count("n"), Get("n")],
    ],
    "a wait ends when the value is set": [[Wait("k", 20, 1000), Get("k")], [Sleep(0.5), Put("k", {"x": 1})]],
    "a wait returns a value that is there": [
        [Put("k", {"x": 1}), Wait("k", 1, 1000)],
        [Sleep(0.5), Wait("k", 1, 1000)],
    ],
    "a wait without a value ends after its time": [[Wait("k", 0.2, 1000), Get("k")], [Sleep(1), Put("k", {})]],
    "a wait for a deleted value goes on": [
        [Put("k", {"x": 1}), Delete("k"), Wait("k", 20, 1000)],
        [Sleep(0.7), Put("k", {"x": 2})],
    ],
    "several wait for the same value": [
        [Wait("k", 20, 1000)],
        [Wait("k", 20, 1000)],
        [Sleep(0.5), Put("k", {"x": 1}, once=True), Put("k", {"x": 2}, once=True)],
    ],
    "a wait for a counter": [[Wait("n", 20, 1000)], [Sleep(0.5), Count("n")]],
    "long values and any characters": [[Put("a", {"text": "äöü\u2028" * 5000}, most=1 << 20), Read("a"), Get("a")], []],
    "a value that is too long is not sent": [[Put("a", {"text": "x" * 100}, most=50), Get("a")], []],
}


@pytest.fixture(scope="module")
def clients() -> Iterator[list[Client]]:
    """Three clients of a real coordination service."""
    address = f"127.0.0.1:{free_port()}"
    service = start_coordination_service(address, 3)
    joined: list[Any] = [None] * 3

    def join(number: int) -> None:
        joined[number] = join_coordination_service(address, number, 60)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    yield joined
    closing = [threading.Thread(target=client.shutdown, daemon=True) for client in joined]  # they wait for each other
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(30)
    service.shutdown()


def answers(script: Script, prefix: str, seen: list[Any]) -> Steps:
    """Makes the calls of a script; collects the answers and the kinds of errors."""
    for action in script:
        try:
            moment = yield _below(prefix, action)
            seen.append(moment.answer if not isinstance(action, Sleep) else None)
        except Exception as error:
            seen.append(type(error).__name__)


def _below(prefix: str, action: Action) -> Action:
    """Returns the action with its key below a prefix, so that scenarios do not see each other's keys."""
    match action:
        case Put(key, value, most, once):
            return Put(f"{prefix}/{key}", value, most, once)
        case Read(home, most):
            return Read(f"{prefix}/{home}", most)
        case Wait(key, seconds, most):
            return Wait(f"{prefix}/{key}", seconds, most)
        case Get(key):
            return Get(f"{prefix}/{key}")
        case Count(key):
            return Count(f"{prefix}/{key}")
        case Delete(key):
            return Delete(f"{prefix}/{key}")
    return action


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_simulated_service_answers_as_the_real_one(name: str, clients: list[Client]) -> None:
    scripts = SCENARIOS[name]
    real: list[list[Any]] = [[] for _ in scripts]
    threads = [
        threading.Thread(target=run, args=(answers(script, f"conformance {name}", seen), Board(client)))
        for script, seen, client in zip(scripts, real, clients, strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    clients[0].key_value_delete(f"conformance {name}")

    simulated: list[list[Any]] = [[] for _ in scripts]
    world = World(1)
    for number, (script, seen) in enumerate(zip(scripts, simulated, strict=True)):
        Task(Host(world, number), answers(script, f"conformance {name}", seen), lambda result: None)
    assert world.run(1000)
    assert real == simulated


# How the third process of three fails in the first restore.
FAULTS = {
    "nothing": (),
    "error": (plans.Fault("error", 2, 0, 1, 1.0),),
    "never": (plans.Fault("never", 2, 0, 1, 1.0),),
    "late": (plans.Fault("late", 2, 0, 1, 2.0),),
    "twice": (plans.Fault("twice", 2, 0, 1, 1.0),),
    "absent": (plans.Fault("absent", 2, 0, 1, 1.0),),
    "interrupt": (plans.Fault("interrupt", 2, 0, 1, 1.0),),
    "stuck": (plans.Fault("stuck", 2, 0, 1, 1.0),),
    "interrupt meeting": (plans.Fault("interrupt meeting", 2, 0, 1, 0.1),),
}
STALL = 1.5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_restore_ends_alike_on_both(fault: str, clients: list[Client]) -> None:
    """The same restore of three processes: on threads with real clients, and simulated."""
    # With this seed the interrupt at the meeting comes, as below, while the others are at work.
    ended = runs.run(plans.Plan(2, 3, 1, 1, STALL, None, FAULTS[fault]))
    assert ended.problems == ()
    simulated = {
        process: [r.error for r in ended.records if (r.process, r.restore) == (process, 0)] for process in range(3)
    }
    real: dict[int, list[BaseException | None]] = {0: [], 1: [], 2: []}
    subject = f"conformance {fault}"
    seconds = 60.0 if fault == "interrupt meeting" else 0.6  # the others are at work when it happens, and are told

    def work(process: int) -> None:
        kind = fault if process == 2 else ""
        if kind == "late":
            time.sleep(STALL + 2)
        if kind == "absent":
            Board(clients[2]).put(SubjectKeys(subject).absence(2), {"why": "no such step"})
            return
        for _ in range(2 if kind == "twice" else 1 - (kind == "never")):
            session = Session(clients[process], process, 3, subject, Limits(STALL))
            real[process].append(_restore(session, kind, seconds))

    threads = [threading.Thread(target=work, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if fault == "absent":
        Board(clients[2]).delete(SubjectKeys(subject).absence(2))
    for process in range(3):
        assert [_outcome(error) for error in real[process]] == [_outcome(error) for error in simulated[process]]
    deadline = time.monotonic() + 10
    while (left := clients[0].key_value_dir_get("orbax_ext/")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _restore(session: Session, fault: str, seconds: float) -> BaseException | None:
    """Arrives, works for some seconds and meets; returns the error of this process."""

    async def work() -> None:
        if fault == "error":
            raise OSError("disk gone")
        await asyncio.sleep({"interrupt meeting": 0.0, "stuck": 60.0}.get(fault, seconds))

    async def work_and_meet() -> None:
        if fault == "interrupt":
            raise InterruptError("stopped by hand")
        meeting = asyncio.ensure_future(session.together("work 1", work()))
        if fault == "interrupt meeting":  # when it has brought its outcome, and waits for those of the others
            await asyncio.wait({meeting}, timeout=0.3)
            meeting.cancel()
        await meeting

    try:
        with session:
            session.arrive({})
            asyncio.run(work_and_meet())
    except (Exception, asyncio.CancelledError) as error:
        return error
    return None


def _outcome(error: BaseException | None) -> tuple[str, list[int]]:
    """Returns the type of an error, and the processes that it names."""
    interrupted = isinstance(error, (InterruptError, asyncio.CancelledError))
    return "interrupted" if interrupted else kind_of(error), named(error)


@pytest.mark.parametrize("stopped", [signal.SIGSTOP, signal.SIGKILL])
def test_a_restore_ends_alike_without_a_service(stopped: signal.Signals) -> None:
    """Process 0, which has the service, is stopped or dies at work. Its calls hang; JAX ends the others if it dies."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tests.simulation.real_process", address]
    jobs = [
        subprocess.Popen([*command, str(number), "3", str(STALL), seconds], stdout=subprocess.PIPE, text=True)
        for number, seconds in enumerate(["60", "0.1", "0.1"])
    ]
    try:
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "arrived\n"
        time.sleep(1)  # processes 1 and 2 wait at the meeting
        jobs[0].send_signal(stopped)
        said = [job.communicate(timeout=60)[0] for job in jobs[1:]]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    real = [json.loads(text) if text else "has died" for text in said]

    kind, seconds = ("pause", 40.0) if stopped == signal.SIGSTOP else ("crash", 3.0)
    stuck = plans.Fault("stuck", 0, 0, 1, 0.0)
    # Each process by itself: whether JAX ends it before the error of its last call is a race.
    simulated: list[set[str]] = [set(), set()]
    for seed in range(20):
        ended = runs.run(plans.Plan(seed, 3, 1, 1, STALL, None, (plans.Fault(kind, 0, 0, 1, seconds), stuck)))
        assert ended.problems == ()
        errors = {r.process: r.error for r in ended.records if r.process and r.restore == 0}
        for process, outcomes in enumerate(simulated, 1):
            outcomes.add(str(list(_outcome(errors[process])) if process in errors else "has died"))
    assert all(str(outcome) in outcomes for outcome, outcomes in zip(real, simulated, strict=True)), (real, simulated)
