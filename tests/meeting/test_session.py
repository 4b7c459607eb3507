"""One process's part in a meeting, with a service that lets the other processes act at a chosen moment."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from orbax_ext import errors
from orbax_ext.meeting import session as session_lib
from orbax_ext.meeting import wire
from orbax_ext.meeting.board import LocalClient
from orbax_ext.meeting.session import Limits, Session, gather
from tests.support.coordination import SharedClient, on_processes

STAMP = {"last": 0, "now": 0.0}
HOME = "orbax_ext/session/s"


class Service(LocalClient):
    """Calls `meanwhile` during the first wait for a key, which then times out."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self.waits += 1
        if self.waits == 1:
            self.meanwhile()
            raise TimeoutError("DEADLINE_EXCEEDED")
        return self.key_value_try_get(key)

    def meanwhile(self) -> None:
        self.key_value_set(f"{HOME}/left/0", json.dumps({"why": ""}))


class ServiceWhereProcess0MeetsAndLeaves(Service):
    def meanwhile(self) -> None:
        summary = wire.pack({0: {"text": "zero"}, 1: {"text": "one"}})
        self.key_value_set(f"{HOME}/out/1", json.dumps({**summary, **STAMP}))
        super().meanwhile()


class ServiceWhereProcess1GivesUp(LocalClient):
    """Process 1 waits, and gives up when process 0 is about to reply to it."""

    def __init__(self) -> None:
        super().__init__()
        self.key_value_set("orbax_ext/restore/in/1", json.dumps({"nonce": "n", "payload": {}}))
        self.key_value_set("orbax_ext/restore/absent/2", json.dumps({"why": "no such step"}))

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if "/reply/1/" in key:
            waiting = Session(self, 1, 3, "restore", Limits(stall=5.0))
            waiting._withdraw(waiting._board, "")
        super().key_value_set(key, value, allow_overwrite)


def test_a_reply_to_a_process_that_has_just_given_up_is_removed() -> None:
    service = ServiceWhereProcess1GivesUp()
    with (
        pytest.raises(errors.RestoreFailedError, match="no such step"),
        Session(service, 0, 3, "restore", Limits(stall=0.1)) as session,
    ):
        session.arrive({})
    assert [key for key, _ in service.key_value_dir_get("orbax_ext/") if "/absent/" not in key] == []


def _session(service: Service) -> Session:
    session = Session(service, 1, 2, "restore", Limits(stall=5.0))
    session.id = "s"
    return session


def test_a_process_may_leave_right_after_a_meeting() -> None:
    contributions = _session(ServiceWhereProcess0MeetsAndLeaves()).meet("work", {"text": "one"})
    assert {process: own["text"] for process, own in contributions.items()} == {0: "zero", 1: "one"}


def test_a_process_that_leaves_before_a_meeting_is_named() -> None:
    with pytest.raises(errors.RestoreFailedError, match=r"process 0 .*left the restore early"):
        _session(Service()).meet("work", {"text": "one"})


async def work() -> str:
    return "done"


def test_a_single_process_meets_alone_and_leaves_no_keys() -> None:
    client = LocalClient()
    with Session(client, 0, 1, "restore", Limits(stall=5.0)) as session:
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
            session._left = process == 2  # as if it had died

    first, second, _ = on_processes(3, run)
    assert str(first) == str(second)
    assert isinstance(first, errors.RestoreFailedError)
    assert first.failures[0].error == first.failures[1].error == "OSError: disk gone"
    assert first.failures[2].error == "no outcome yet, no report"
