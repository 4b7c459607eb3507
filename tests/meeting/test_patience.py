from __future__ import annotations

import pytest

from orbax_ext import errors
from orbax_ext.meeting.actions import Log, Moment, Sleep
from orbax_ext.meeting.board import Board, LocalClient
from orbax_ext.meeting.driver import perform
from orbax_ext.meeting.leader import Leader
from orbax_ext.meeting.terms import Limits, Place

pytestmark = pytest.mark.once


def test_waiting_ends_also_if_every_call_takes_long() -> None:
    board, now = Board(LocalClient()), 0.0
    leader = Leader(Place(0, 2, "host0"), "restore", Limits(stall=60.0), "nonce", now, {})

    def arrive() -> None:
        nonlocal now
        steps = leader.arrive({})
        action = next(steps)
        while now < 1000:
            answer = None if isinstance(action, Sleep | Log) else perform(action, board)
            now += action.seconds if isinstance(action, Sleep) else 1.5
            action = steps.send(Moment(answer, now, now))

    with pytest.raises(errors.RestoreTimeoutError):
        arrive()
    assert now < 120
