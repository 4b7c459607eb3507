"""The simulated service and a real coordination service give the same answers to the same calls."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

import pytest

from orbax_ext.meeting.actions import Action, Count, Delete, Get, Put, Read, Sleep, Steps, Wait
from orbax_ext.meeting.board import Board, Client
from orbax_ext.meeting.driver import run
from orbax_ext.meeting.keys import SubjectKeys
from orbax_ext.meeting.refusal import refuse
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.terms import Limits
from orbax_ext.meeting.threads import in_thread
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


# How one process of three fails in the first restore.
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
    "interrupt arrival": (plans.Fault("interrupt arrival", 2, 0, 1, 0.6),),
    "interrupt arrival of process 0": (plans.Fault("interrupt arrival", 0, 0, 1, 0.6),),
    "cancel": (plans.Fault(plans.CANCEL, 2, 0, 1, 0.1),),
}
# A world in which the interrupt comes, as below, while others are at work, or while one of them is still to come.
WORLDS = {"interrupt arrival": 1, "interrupt arrival of process 0": 9}
STALL = 1.5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_restore_ends_alike_on_both(fault: str, clients: list[Client]) -> None:
    """The same restore of three processes: on threads with real clients, and simulated."""
    ended = runs.run(plans.Plan(WORLDS.get(fault, 2), 3, 1, 1, STALL, None, FAULTS[fault]))
    assert ended.problems == ()
    simulated = {
        process: [r.error for r in ended.records if (r.process, r.restore) == (process, 0)] for process in range(3)
    }
    real: dict[int, list[BaseException | None]] = {0: [], 1: [], 2: []}
    subject = f"conformance {fault}"
    faulty = FAULTS[fault][0].process if FAULTS[fault] else 2
    seconds = 60.0 if fault == "interrupt meeting" else 0.6  # the others are at work when it happens, and are told

    def work(process: int) -> None:
        kind = fault.partition(" of ")[0] if process == faulty else ""
        if kind == "late":
            time.sleep(STALL + 2)
        if kind == "absent":
            Board(clients[2]).put(SubjectKeys(subject).absence(2), {"why": "no such step"})
            return
        if fault.startswith("interrupt arrival") and process == 1:
            time.sleep(0.8)  # the one that is interrupted waits for it
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

    async def interrupted(waiting: Awaitable[object], after: float) -> None:
        task = asyncio.ensure_future(waiting)
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        await task

    async def arrive_and_meet() -> None:
        arriving = in_thread(session.arrive, {})
        await (interrupted(arriving, 0.3) if fault == "interrupt arrival" else arriving)
        if fault == "interrupt":
            raise InterruptError("stopped by hand")
        if fault == "cancel":
            refuse(session)
        meeting = session.together("work 1", work())  # it has brought its outcome when it is interrupted
        await (interrupted(meeting, 0.3) if fault == "interrupt meeting" else meeting)

    try:
        with session:
            asyncio.run(arrive_and_meet())
    except (Exception, asyncio.CancelledError) as error:
        return error
    return None


def _outcome(error: BaseException | None) -> tuple[str, list[int]]:
    """Returns the type of an error, and the processes that it names."""
    interrupted = isinstance(error, (InterruptError, asyncio.CancelledError))
    return "interrupted" if interrupted else kind_of(error), named(error)


# Which process is stopped or killed when all have arrived, and after how many seconds it goes on.
STOPS = {
    "process 0 is stopped": (0, signal.SIGSTOP, math.inf),
    "process 0 is killed": (0, signal.SIGKILL, math.inf),
    "process 0 is stopped for a while": (0, signal.SIGSTOP, 4.0),
    "another one is killed": (1, signal.SIGKILL, math.inf),
    "another one is stopped for a moment": (1, signal.SIGSTOP, 0.8),
    "another one is stopped for a while": (1, signal.SIGSTOP, 8.0),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_restore_with_a_stopped_process_ends_alike_on_both(name: str) -> None:
    """On real processes with signals, and simulated.

    Without process 0 there is no service: calls hang if it is stopped, and JAX ends the others if it dies.
    """
    stopped, how, seconds = STOPS[name]
    real = _ends_of_real_processes(*STOPS[name])
    kind = "crash" if how == signal.SIGKILL else "pause"
    faults = [plans.Fault(kind, stopped, 0, 1, {signal.SIGKILL: 3.0}.get(how, min(seconds, 40.0)))]
    if math.isinf(seconds):  # it does not come to the meeting before
        faults.append(plans.Fault("stuck", stopped, 0, 1, 0.0))
    # Each process by itself: whether JAX ends it before the error of its last call is a race.
    simulated: list[set[str]] = [set(), set(), set()]
    for seed in range(40):
        ended = runs.run(plans.Plan(seed, 3, 1, 1, STALL, None, tuple(faults)))
        assert ended.problems == ()
        errors = {r.process: r.error for r in ended.records if r.restore == 0}
        for process, outcomes in enumerate(simulated):
            outcomes.add(str(list(_outcome(errors[process])) if process in errors else "has died"))
    compared = [process for process in range(3) if process != stopped or not math.isinf(seconds)]
    assert all(str(real[process]) in simulated[process] for process in compared), (real, simulated)


def _ends_of_real_processes(stopped: int, how: signal.Signals, seconds: float) -> list[Any]:
    """Returns how each of three processes ends; one that is stopped for ever, or that has died, says nothing."""
    command = [sys.executable, "-m", "tests.simulation.real_process", f"127.0.0.1:{free_port()}"]
    work = {stopped: "60" if math.isinf(seconds) else "1"}  # so that it is at work when it is stopped
    jobs = [
        subprocess.Popen(
            [*command, str(number), "3", str(STALL), work.get(number, "0.1")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "arrived\n"
        if math.isinf(seconds):
            time.sleep(1)  # the others wait at the meeting
        jobs[stopped].send_signal(how)
        if not math.isinf(seconds):
            time.sleep(seconds)
            jobs[stopped].send_signal(signal.SIGCONT)
        saying = [job for number, job in enumerate(jobs) if number != stopped or not math.isinf(seconds)]
        said = {job: _line(job) for job in saying}
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return [json.loads(said[job]) if said.get(job) else "has died" for job in jobs]


def _line(job: subprocess.Popen[str]) -> str:
    """Returns the next line that a process prints; empty if it dies, or says nothing for a minute."""
    lines: list[str] = []
    assert job.stdout is not None
    reader = threading.Thread(target=lambda stream: lines.append(stream.readline()), args=(job.stdout,), daemon=True)
    reader.start()
    reader.join(60)
    return "".join(lines)
