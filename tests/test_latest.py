"""One attempt of `restore_latest_valid`, without other processes."""

from __future__ import annotations

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
