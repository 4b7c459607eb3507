"""The protocol of the meetings: what every process but process 0 does. It waits for what process 0 decides. Pure.

`meeting/protocol.py` has what all processes do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from orbax_ext import errors
from orbax_ext.meeting import wire
from orbax_ext.meeting.actions import Action, Get, Log, Moment, Put, Read, Steps, Wait
from orbax_ext.meeting.arrivals import BY, CAME, contributions, missing_from
from orbax_ext.meeting.protocol import (
    ERROR,
    GRACE,
    LEADER,
    RESTORE_ERRORS,
    SPREAD,
    Contributions,
    Member,
    Patience,
    take,
    waiting_for,
)
from orbax_ext.meeting.wire import Contribution


class Follower(Member):
    """A process that waits for what process 0 decides, and gives up if process 0 does not decide."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.delays: list[float] = []  # of process 0's messages: sent by its clock, received by this process's
        self._grace = GRACE + SPREAD * self.place.process / self.place.processes

    def arrive(self, mine: Contribution) -> Contributions:
        """Waits until process 0 has opened a session with all processes. Returns what they brought."""
        yield from self.come(mine)
        outcome = yield from self._await(
            self.keys.reply(self.place.process, self.nonce), self.keys.status, self._not_arrived, self.give_up_arrival
        )
        if ERROR not in outcome:
            self.enter(outcome["id"])
            outcome = yield from self._await_outcome(0)
        yield from self.end_arrival()
        found = wire.unpack(take(outcome))
        self.met(found)
        self.next = 1
        return found

    def meet(self, phase: str, mine: Contribution) -> Contributions:
        """Waits until all processes are at this meeting; returns their contributions."""
        number, self.phase = self.next, phase
        yield from self.wake()
        key = self.in_session().contribution(number, self.place.process)
        yield from self.call(Put(key, {**mine, CAME: self.wall}))
        outcome = yield from self._await_outcome(number)
        found = wire.unpack(take(outcome))
        self.next = number + 1
        return found

    def _await_outcome(self, number: int) -> Steps:
        session = self.in_session()

        def missing() -> Generator[Action, Moment, list[int]]:
            if number == 0:  # all had arrived when process 0 replied
                yield from self.arrivals()
                return []
            found = yield from self.call(Read(session.meeting(number), self.most))
            return missing_from(contributions(found), self.place.processes)

        def give_up(error: errors.RestoreFailedError | errors.RestoreTimeoutError) -> Steps:
            outcome = {ERROR: wire.restore_error_to_json(error)}
            stands = yield from self.decide(session.outcome(number), outcome)
            if stands is outcome and number == 0:  # process 0 may not have replied to all
                yield from self.tell_waiting(outcome)
            return stands

        return self._await(session.outcome(number), session.status, missing, give_up)

    def _not_arrived(self) -> Generator[Action, Moment, list[int]]:
        """Returns who has not arrived.

        Raises the error of a process that is telling it to the others just now: those who have been told may have left
        already, so they are not missing, and this process has nobody to tell. Who tells still stands there: a reply of
        another one is of an earlier restore, to a process that has been stuck since.
        """
        arrivals = yield from self.arrivals()
        for process, nonce in arrivals.nonces.items():
            reply = arrivals.replies.get((process, nonce), {})
            if ERROR in reply and reply.get(BY) in arrivals.nonces.values():
                self.seen = {}
                take(reply)
        return missing_from(arrivals.nonces, self.place.processes)

    def _await(
        self,
        key: str,
        status: str,
        missing: Callable[[], Generator[Action, Moment, list[int]]],
        give_up: Callable[[Any], Steps],
    ) -> Steps:
        """Waits for a decision of process 0; returns what is decided, if need be by this process."""
        patience = Patience(self, self._grace)
        news: Mapping[Any, str] = {}
        while True:
            found = yield from self.call(Wait(key, self.look_every, self.most))
            if found is not None:
                self.last = found.get("last")
                self.delays.append(self.wall - found.get("now", self.wall))
                return found
            report = yield from self.call(Get(status))
            if report is not None:
                news = report["news"]
                patience.note((report["advance"], report["missing"]))
            if patience.time_to_log():
                yield from self.call(Log(waiting_for(self, report["missing"] if report else [LEADER])))
            try:
                if not self.id and (note := (yield from self.call(Get(self.keys.absence(LEADER))))):
                    raise errors.RestoreFailedError({LEADER: self.failure(LEADER, str(note["why"]))})
                if patience.expired(self.limits.stall):
                    raise self.timeout((yield from missing()) or [LEADER], news)
            except RESTORE_ERRORS as error:
                return (yield from give_up(error))
