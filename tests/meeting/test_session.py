"""Sessions of threads on a service in memory. What may happen in which order is tested in tests/simulation."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import types
from collections.abc import Callable

import jax
import pytest
import uvloop

from orbax_ext import errors
from orbax_ext.meeting import board as board_lib
from orbax_ext.meeting import driver, threads
from orbax_ext.meeting import session as session_lib
from orbax_ext.meeting.board import Board, LocalClient
from orbax_ext.meeting.protocol import ERROR, MORE, TOOK
from orbax_ext.meeting.session import Limits, Session, gather
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import restore_error_to_json
from orbax_ext.upstream import runtime
from tests.support.coordination import SharedClient, on_processes

pytestmark = pytest.mark.once


async def work() -> str:
    return "done"


def test_a_single_process_meets_alone_and_leaves_no_keys() -> None:
    client = LocalClient()
    with Session(client, 0, 1, "restore", Limits(stall=5.0)) as session:
        assert session.id == ""
        assert session.arrive({"text": "a"})[0]["text"] == "a"
        assert session.meet("work", {"text": "b"}) == {0: {"text": "b"}}
        assert asyncio.run(session.together("work", work())) == "done"
        assert session.hand_in("report") == {0: "report"}
    assert client.key_value_dir_get("") == []


def test_a_job_of_one_process_needs_no_service() -> None:
    assert gather("test", {"text": "a"}, Limits(stall=5.0))[0]["text"] == "a"


def test_a_process_that_does_not_arrive_is_named_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_lib, "_hosts_met", {1: "host1"})
    session = Session(SharedClient(), 0, 2, "restore", Limits(stall=0.1))
    with pytest.raises(errors.RestoreTimeoutError) as caught, session:
        session.arrive({})
    assert caught.value.missing == (1,)
    first, *lines = str(caught.value).splitlines()
    assert re.fullmatch(r"gave up in phase 'arrive' after \d+ s \(stall_timeout=0\.1\); missing:", first)
    assert lines == [
        "  process 1 (host1): has not arrived at this restore",
        "Look for the reason in the log of each missing process; if it is only slow, raise the limit.",
    ]


def test_a_process_that_never_reports_is_named_beside_the_one_that_failed() -> None:
    client = SharedClient()

    async def fail() -> None:
        raise OSError("disk gone")

    def run(process: int) -> None:
        with Session(client, process, 3, "restore", Limits(stall=2.0)) as session:
            session.arrive({})
            if process != 2:
                asyncio.run(session.together("work", fail()))
            session._member._left = process == 2  # as if it had died

    first, second, _ = on_processes(3, run)
    assert str(first) == str(second)
    assert isinstance(first, errors.RestoreFailedError)
    assert first.failures[0].error == first.failures[1].error == "OSError: disk gone"
    assert first.failures[2].error == "no outcome yet, no report"


def test_a_process_that_reports_without_progress_is_not_named_beside_the_one_that_failed() -> None:
    client = SharedClient()

    async def do(process: int) -> None:
        if process == 1:
            raise OSError("disk gone")
        if process == 2:  # it waits for process 1, and is cancelled when that has failed
            await asyncio.Event().wait()

    def run(process: int) -> None:
        with Session(client, process, 3, "restore", Limits(stall=30.0)) as session:
            session.arrive({})
            asyncio.run(session.together("work", do(process)))

    ended = on_processes(3, run)
    for error in ended:
        assert isinstance(error, errors.RestoreFailedError)
        assert list(error.failures) == [1]


def test_process_0_ends_its_wait_when_another_has_given_up_and_says_so() -> None:
    client = SharedClient()
    given_up = errors.RestoreTimeoutError("gave up", [2], {})

    def run(process: int) -> None:
        with Session(client, process, 3, "restore", Limits(stall=60.0)) as session:
            session.arrive({})

    def tell(process: int) -> None:
        while not (arrived := client.key_value_dir_get("orbax_ext/restore/arrive/0/")):
            time.sleep(0.01)
        reply = arrived[0][0].removesuffix("/in") + "/reply"
        Board(client).put(reply, {ERROR: restore_error_to_json(given_up)}, once=True)

    began = time.monotonic()
    error, _ = on_processes(2, lambda process: tell(process) if process else run(process))
    assert isinstance(error, errors.RestoreTimeoutError)
    assert error.missing == (2,)
    assert time.monotonic() - began < 30


def test_a_process_that_does_not_come_to_the_barrier_is_named_and_not_those_who_waited_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, barrier = SharedClient(), threading.Barrier(3)

    def wait(name: str, timeout: float, processes: set[int]) -> None:
        assert (timeout, processes) == (1, {0, 1, 2})
        barrier.wait(timeout)

    monkeypatch.setattr(runtime, "sync_global_processes", wait)

    def run(process: int) -> None:
        with Session(client, process, 3, "restore", Limits(stall=1.0)) as session:
            session.arrive({})
            if process != 2:
                asyncio.run(session.barrier("before the exchange"))
            session._member._left = process == 2  # as if it had died

    first, second, _ = on_processes(3, run)
    assert isinstance(first, errors.RestoreTimeoutError)
    assert first.missing == (2,)
    assert str(first) == str(second)


def test_a_process_that_leaves_before_a_meeting_is_named() -> None:
    client = SharedClient()

    def run(process: int) -> None:
        with Session(client, process, 2, "restore", Limits(stall=5.0)) as session:
            session.arrive({})
            if process == 1:
                session.meet("work")

    _, error = on_processes(2, run)
    assert isinstance(error, errors.RestoreFailedError)
    assert error.failures[0].error == "left the restore early"
    assert client.key_value_dir_get("") == []


def test_a_process_may_leave_right_after_a_meeting() -> None:
    client = SharedClient()

    def run(process: int) -> dict[int, object]:
        with Session(client, process, 4, "restore", Limits(stall=5.0)) as session:
            session.arrive({})
            return dict(session.meet("work", {"number": process}))

    assert on_processes(4, run) == [{process: {"number": process} for process in range(4)}] * 4
    assert client.key_value_dir_get("") == []


def test_a_meeting_before_the_arrival_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call `arrive` first"):
        Session(LocalClient(), 0, 1, "restore", Limits(stall=5.0)).meet("work")


@pytest.mark.parametrize("stuck", [(0,), (1,), (0, 1)])
def test_a_process_that_is_stuck_at_work_ends_with_the_others(stuck: tuple[int, ...]) -> None:
    client = SharedClient()
    never = asyncio.Event

    async def do(process: int) -> None:
        if process in stuck:
            await never().wait()

    def run(process: int) -> None:
        with Session(client, process, 2, "restore", Limits(stall=1.0)) as session:
            session.arrive({})
            asyncio.run(session.together("work", do(process)))

    first, second = on_processes(2, run)
    assert isinstance(first, errors.RestoreTimeoutError)
    assert first.missing == stuck
    assert str(first) == str(second)
    assert client.key_value_dir_get("") == []


def test_work_that_is_cancelled_from_outside_ends_the_meeting_for_the_others() -> None:
    client = SharedClient()

    async def cancelled() -> None:
        raise asyncio.CancelledError

    def run(process: int) -> None:
        with Session(client, process, 2, "restore", Limits(stall=5.0)) as session:
            session.arrive({})
            asyncio.run(session.together("work", cancelled() if process == 1 else work()))

    error, _ = on_processes(2, lambda process: run(process) if process == 0 else _swallow(lambda: run(process)))
    assert isinstance(error, errors.RestoreFailedError)
    assert error.failures[1].error == "CancelledError: the restore was interrupted"


def _swallow(function: Callable[[], None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        function()


def test_late_processes_are_asked_again_when_fewer_are_late() -> None:
    client = SharedClient()
    asked: dict[int, list[int]] = {1: [], 2: []}

    def run(process: int) -> None:
        async def meet() -> None:
            come = asyncio.Event()

            def note(late: int) -> None:
                asked[process].append(late)
                if late == process:  # process 2 comes at once, process 1 when it is the only one
                    come.set()

            read = come.wait() if process in asked else asyncio.sleep(0)
            await session.together_telling("read", read, lambda: {TOOK: 0.01}, note)

        with Session(client, process, 4, "restore", Limits(stall=60.0, late=0.1)) as session:
            session.arrive({})
            asyncio.run(meet())

    assert on_processes(4, run) == [None] * 4
    assert set(asked[2]) == {2}
    assert asked[1][-1] == 1


def test_nobody_is_late_while_the_others_have_other_work() -> None:
    client = SharedClient()
    asked: list[int] = []

    def run(process: int) -> None:
        async def meet() -> None:
            read = asyncio.sleep(1.0 if process == 3 else 0)
            await session.together_telling("read", read, lambda: {TOOK: 0.01, MORE: 30.0}, asked.append)

        with Session(client, process, 4, "restore", Limits(stall=60.0, late=0.1)) as session:
            session.arrive({})
            asyncio.run(meet())

    assert on_processes(4, run) == [None] * 4
    assert not asked


def test_an_absence_counts_only_in_the_attempt_in_which_it_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SharedClient()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(runtime, "coordination_client", lambda: client)

    def arrive(attempt: str) -> errors.RestoreError:
        monkeypatch.setattr(jax, "process_index", lambda: 0)
        with (
            session_lib.attempting("restore", attempt),
            pytest.raises(errors.RestoreError) as caught,
            session_lib.open_session("restore", Limits(stall=0.5)) as session,
        ):
            session.arrive({})
        return caught.value

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with session_lib.attempting("restore", "ID step 3"):
        session_lib.tell_absent("restore", FileNotFoundError("no such step"))
    assert "FileNotFoundError: no such step" in str(arrive("ID step 3"))
    assert isinstance(arrive("ID step 2"), errors.RestoreTimeoutError)


def test_a_process_that_was_stopped_does_not_give_up_a_service_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    client, stopped = SharedClient(), [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0], time=time.time, sleep=time.sleep)
    for module in (board_lib, driver, session_lib, threads):
        monkeypatch.setattr(module, "time", clock)

    def run(process: int) -> dict[int, object]:
        with Session(client, process, 2, "restore", Limits(stall=30.0)) as session:
            session.arrive({})
            if process == 0:
                time.sleep(0.5)  # process 1 waits at the meeting
                stopped[0] = 1000.0
                time.sleep(1)  # it looks at its limits
            return dict(session.meet("work", {"number": process}))

    assert on_processes(2, run) == [{0: {"number": 0}, 1: {"number": 1}}] * 2


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_arrival_is_taken_back_before_a_loop_that_is_closed_under_it_is(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    client, loop = LocalClient(), new_loop()

    async def restore() -> None:
        with Session(client, 0, 2, "restore", Limits()) as session:
            await in_thread(session.arrive, {})

    async def fail_beside_it() -> None:
        restoring.append(asyncio.ensure_future(restore()))
        while not client.key_value_dir_get("orbax_ext/restore/arrive/0/"):
            await asyncio.sleep(0.01)
        raise OSError("no such number")

    restoring: list[asyncio.Task[None]] = []
    with pytest.raises(OSError, match="no such number"):
        loop.run_until_complete(fail_beside_it())
    loop.close()
    assert client.key_value_dir_get("orbax_ext/") == []
