"""The simulated service and a real coordination service give the same answers to the same calls."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from orbax_ext.meeting.actions import Action, Count, Delete, Get, Put, Read, Sleep, Steps, Wait
from orbax_ext.meeting.board import Board, Client
from orbax_ext.meeting.driver import run
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.terms import Limits
from orbax_ext.upstream.runtime import join_coordination_service, start_coordination_service
from tests.simulation import plans, runs
from tests.simulation.world import Host, Task, World

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
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


@pytest.mark.parametrize("fault", [None, "error", "never", "interrupt"])
def test_a_restore_ends_alike_on_both(fault: str | None, clients: list[Client]) -> None:
    """The same restore of three processes: on threads with real clients, and simulated."""
    faults = () if fault is None else (plans.Fault(fault, 2, 0, 1, 1.0),)
    plan = plans.Plan(1, 3, 1, 1, 2.0, None, faults)
    simulated = {record.process: record for record in runs.run(plan).records if record.restore == 0}
    real: dict[int, Exception | None] = {}

    def restore(process: int) -> None:
        session = Session(clients[process], process, 3, f"conformance {fault}", Limits(2.0))
        try:
            with session:
                if fault == "never" and process == 2:
                    return
                session.arrive({})
                if fault == "interrupt" and process == 2:
                    raise InterruptedError("stopped by hand")
                failing = {"error": "OSError: disk gone"} if fault == "error" and process == 2 else {}
                if "error" in (found := session.meet("work 1", failing))[2]:
                    raise OSError(found[2]["error"])
            real[process] = None
        except Exception as error:
            real[process] = error

    threads = [threading.Thread(target=restore, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for process in (0, 1):
        assert (real[process] is None) == (simulated[process].error is None)
        if fault in ("never", "interrupt"):
            assert type(real[process]) is type(simulated[process].error)
            assert "process 2" in str(real[process])
            assert simulated[process].named == {2}
    deadline = time.monotonic() + 10
    while (left := clients[0].key_value_dir_get("orbax_ext/")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
