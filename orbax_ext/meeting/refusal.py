"""Ends a meeting at which this process waits, because its restore was cancelled: on all processes alike."""

from __future__ import annotations

import contextlib

from orbax_ext import errors
from orbax_ext.meeting.actions import Put, Steps
from orbax_ext.meeting.driver import run
from orbax_ext.meeting.protocol import ERROR, Member
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.threads import begin
from orbax_ext.meeting.wire import restore_error_to_json


def refuse(session: Session) -> None:
    """Lets the meeting fail that this process is at, or comes to next, unless its outcome stands. Does not wait."""

    def decide() -> None:
        with contextlib.suppress(Exception):  # the session is over, or its limits end it
            run(decision(session._member), session._board)

    begin(decide)


def decision(member: Member) -> Steps:
    """Decides a meeting while another machine of this process may be waiting for its outcome."""
    process = member.place.process
    why = errors.RestoreFailedError({process: member.failure(process, "InterruptedError: the restore was cancelled")})
    outcome = member.in_session().outcome(member.next)
    yield Put(outcome, {ERROR: restore_error_to_json(why)}, member.most, once=True)
