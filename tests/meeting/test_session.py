"""One process's side of a meeting, against a notice board on which the others' moves are timed to the moment."""

from __future__ import annotations

import json

import pytest

from orbax_ext import errors
from orbax_ext.meeting import wire
from orbax_ext.meeting.board import LocalClient
from orbax_ext.meeting.session import Limits, Session

STAMP = {"last": 0, "now": 0.0}
HOME = "orbax_ext/session/s"


class Service(LocalClient):
    """Calls `meanwhile` when somebody waits for a key in vain."""

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


class ServiceOfOneWhoMetAndLeft(Service):
    def meanwhile(self) -> None:
        found = wire.pack({0: {"said": "zero"}, 1: {"said": "one"}})
        self.key_value_set(f"{HOME}/out/1", json.dumps({**found, **STAMP}))
        super().meanwhile()


class ServiceOfOneWhoGivesUpMeanwhile(LocalClient):
    """Process 1 waits, until process 0 is about to reply to it."""

    def __init__(self) -> None:
        super().__init__()
        self.key_value_set("orbax_ext/restore/in/1", json.dumps({"nonce": "n", "payload": {}}))
        self.key_value_set("orbax_ext/restore/absent/2", json.dumps({"why": "no such step"}))

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if "/reply/1/" in key:
            waiting = Session(self, 1, 3, "restore", Limits(stall=5.0))
            waiting._withdraw(waiting._board, "")
        super().key_value_set(key, value, allow_overwrite)


def test_a_reply_to_one_who_has_just_given_up_is_taken_back() -> None:
    service = ServiceOfOneWhoGivesUpMeanwhile()
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


def test_a_process_that_leaves_after_a_meeting_has_not_left_early() -> None:
    found = _session(ServiceOfOneWhoMetAndLeft()).meet("work", {"said": "one"})
    assert {process: payload["said"] for process, payload in found.items()} == {0: "zero", 1: "one"}


def test_a_process_that_leaves_before_a_meeting_is_named() -> None:
    with pytest.raises(errors.RestoreFailedError, match=r"process 0 .*left the restore early"):
        _session(Service()).meet("work", {"said": "one"})
