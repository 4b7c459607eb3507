"""One attempt of `restore_latest_valid`, without other processes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import jax
import pytest

from orbax_ext import errors, latest
from orbax_ext.meeting.session import Limits, Session, attempting
from orbax_ext.upstream import runtime
from tests.support.coordination import SharedClient

pytestmark = pytest.mark.once


@pytest.mark.parametrize("ends", [errors.RestoreTimeoutError("nobody came", [0], {}), KeyboardInterrupt()])
def test_an_absence_does_not_outlive_the_attempt(monkeypatch: pytest.MonkeyPatch, ends: BaseException) -> None:
    client = SharedClient()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(runtime, "coordination_client", lambda: client)

    def arrive(*args: Any) -> None:
        assert [key for key, _ in client.key_value_dir_get("")] == ["orbax_ext/restore/absent/1/ID step 3"]
        raise ends

    monkeypatch.setattr(Session, "arrive", arrive)
    manager = mock.Mock(restore=mock.Mock(side_effect=FileNotFoundError("No step 3")))
    with pytest.raises(type(ends)), attempting("restore", "ID step 3"):
        latest._attempt(manager, 3, None, {}, Limits(stall=5.0))
    assert client.key_value_dir_get("") == []


@pytest.mark.parametrize("look", ["reload", "all_steps"])
def test_silent_storage_is_an_error(look: str) -> None:
    manager = mock.Mock(**{f"{look}.side_effect": lambda: time.sleep(60)})
    with pytest.raises(TimeoutError, match=r"could not list steps within 0\.5 s: storage does not answer"):
        latest.restore_latest_valid(manager, stall_timeout=0.5)
