from __future__ import annotations

import pytest

from orbax_ext import errors
from orbax_ext.meeting.actions import Log, Moment, Sleep
from orbax_ext.meeting.board import Board, LocalClient
from orbax_ext.meeting.driver import perform
from orbax_ext.meeting.leader import Leader
from orbax_ext.meeting.terms import Limits, Place

pytestmark = pytest.mark.once


@pytest.mark.parametrize("seconds", [1.5, 10.0, 50.0])
def test_waiting_ends_also_if_every_call_takes_long(seconds: float) -> None:
    board, now = Board(LocalClient()), 0.0
    leader = Leader(Place(0, 2, "host0"), "restore", Limits(stall=60.0), "nonce", now, {})

    def arrive() -> None:
        nonlocal now
        steps = leader.arrive({})
        action = next(steps)
        while now < 10_000:
            answer = None if isinstance(action, Sleep | Log) else perform(action, board)
            now += action.seconds if isinstance(action, Sleep) else seconds
            action = steps.send(Moment(answer, now, now))

    with pytest.raises(errors.RestoreTimeoutError):
        arrive()
    assert now < 60 + 20 * seconds
