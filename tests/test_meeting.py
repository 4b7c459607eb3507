"""One process's side of a meeting, against a notice board on which the others' moves are timed to the moment."""

from __future__ import annotations

import json

import pytest

from orbax_ext import compat, errors, meeting, summary

STAMP = {"last": 0, "now": 0.0}
HOME = "orbax_ext/session/s"


class Service(compat.LonelyClient):
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
        found = summary.pack({0: {"said": "zero"}, 1: {"said": "one"}})
        self.key_value_set(f"{HOME}/out/1", json.dumps({**found, **STAMP}))
        super().meanwhile()


def _session(service: Service) -> meeting.Session:
    session = meeting.Session(service, 1, 2, "restore", meeting.Limits(stall=5.0))
    session.id = "s"
    return session


def test_a_process_that_leaves_after_a_meeting_has_not_left_early() -> None:
    found = _session(ServiceOfOneWhoMetAndLeft()).meet("work", {"said": "one"})
    assert {process: payload["said"] for process, payload in found.items()} == {0: "zero", 1: "one"}


def test_a_process_that_leaves_before_a_meeting_is_named() -> None:
    with pytest.raises(errors.RestoreFailedError, match=r"process 0 .*left the restore early"):
        _session(Service()).meet("work", {"said": "one"})
