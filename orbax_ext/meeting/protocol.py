"""The protocol of the meetings as state machines without I/O: what every process does. Pure.

A machine is a generator. It yields an action (`Put`, `Read`, `Wait`, ...) and is sent a `Moment` in return: the answer
of the service, and the time. It has no thread, no clock and no client. `meeting/session.py` drives it on JAX's
coordination service; `tests/simulation/` drives the same code on a simulated one.

Two rules make all processes end with the same result:

- **A decision is a key that can be set once.** The outcome of a meeting and the reply to an arrival are such keys.
  Process 0 decides them; a process that gives up or leaves tries to decide them too. The first one wins, and everybody
  takes what stands there, also the process that came second.
- **A process removes only its own arrival.** So an arrival can't be removed by somebody who took it for an older one.

docs/internals/meetings.md describes the keys; `meeting/leader.py` has what process 0 does, and
`meeting/follower.py` what the others do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, TypeAlias

from orbax_ext import errors, text
from orbax_ext.meeting.actions import Action, Count, Delete, Get, Moment, Put, Read, Sleep, Steps
from orbax_ext.meeting.arrivals import BY, CAME, Arrivals
from orbax_ext.meeting.keys import SessionKeys, SubjectKeys
from orbax_ext.meeting.terms import MAX_VALUE, Limits, Place, Word
from orbax_ext.meeting.wire import Contribution, failure_to_json, restore_error_from_json, restore_error_to_json

LEADER = 0
GRACE = 3.0  # seconds that the others wait longer than process 0, whose error names the missing processes
SPREAD = 1.0  # seconds between the first and the last process that gives up: the first one tells the others
SILENCE = 5.0  # seconds more that all wait for a service that does not answer
LEAVE_LIMIT = 5.0  # seconds to remove keys: the restore is over, so nobody waits for it
HAND_IN_LIMIT = 5.0  # seconds that process 0 waits for reports, which a restore does not need
LOG_EVERY = 30.0  # seconds
MAX_NAMES = 16  # processes that a message names
ERROR = "restore_error"  # in a reply or an outcome: the error that all processes raise
TOOK = "took"  # in a contribution: the seconds that its work took; all have it if late ones are not waited for
MORE = "more"  # in a contribution: the seconds for which it has other work, which it does while it waits
ONLY_WAITED = "only waited"  # marks the error of a process that did nothing but wait for others
RESTORE_ERRORS = (errors.RestoreFailedError, errors.RestoreTimeoutError)  # those that all processes raise
_MOMENT = 1.0  # seconds: a call that takes longer shows that this process or the service stood still
_STOPS = 5  # so many times, the longest ones, may they stand still in one wait without using up its limit
_MESSAGE = 0.1  # seconds that a message of process 0 usually takes at most

Contributions: TypeAlias = Generator[Action, Moment, dict[int, Contribution]]


class Patience:
    """Decides when a process has waited too long, and when to log that it waits."""

    def __init__(self, waiting: Member, grace: float = 0.0) -> None:
        self._waiting = waiting
        self._grace = grace
        self._advanced, self._logged, self._stops = waiting.now, waiting.now, len(waiting.stops)
        self._seen: object = None

    def note(self, state: object) -> None:
        """Waiting starts again if the state differs from the last one."""
        if state != self._seen:
            self._seen, self._advanced, self._stops = state, self._waiting.now, len(self._waiting.stops)

    def expired(self, stall: float) -> bool:
        # Nobody was heard in a stop, so it does not count; all of them do not count if every call is one.
        stopped = sum(heapq.nlargest(_STOPS, self._waiting.stops[self._stops :]))
        waited_too_long = self._waiting.now - self._advanced - stopped > stall + self._grace
        return waited_too_long or self._waiting.now > self._waiting.deadline + self._grace

    def time_to_log(self) -> bool:
        if self._waiting.now - self._logged <= LOG_EVERY:
            return False
        self._logged = self._waiting.now
        return True


class Member:
    """What process 0 and the others have in common: giving up, leaving, reports.

    Args:
      place: Who this process is.
      subject: Name of the session; sessions with different subjects do not affect each other.
      limits: How long to wait.
      nonce: A text that no other session has. Later nonces of the same process are greater.
      now: The time.
      hosts_met: Hosts of earlier sessions, to name a process that does not arrive at this one. Is added to.
    """

    def __init__(
        self, place: Place, subject: str, limits: Limits, nonce: str, now: float, hosts_met: dict[int, str]
    ) -> None:
        self.place = place
        self.limits = limits
        self.nonce = nonce
        self.keys = SubjectKeys(subject, place.attempt)
        self.session: SessionKeys | None = None  # once process 0 has replied
        self.id = ""
        self.phase = "arrive"
        self.hosts: dict[int, str] = {}
        self.last: int | None = None  # the last to arrive at the latest meeting
        self.next, self.late = 0, 0  # the meeting it is at or goes to next, 0: the arrival; how many are late there
        self.now = self._started = now
        self.deadline = math.inf if limits.total is None else now + limits.total
        self.wall = 0.0
        self.stops: list[float] = []  # the seconds for which this process or the service stood still, one by one
        # With many processes each one looks less often, so that the load on the service stays the same.
        self.look_every = min(10.0, max(2.0, place.processes / 100), max(limits.stall / 4, 0.5))
        self.most = MAX_VALUE * place.processes  # characters of an outcome
        self.seen: Mapping[int, str] = {}  # the nonces of those who had arrived when this process looked last
        self._hosts_met = hosts_met
        self.unanswered = False  # the service has stopped answering this process
        self._arriving = self._left = False
        self._looked = self._began = now
        self._reported, self._reports_made = -math.inf, 0
        self._working_on: tuple[int, str] | None = None
        self.report_every = max(1.0, place.processes / 200)  # seconds

    def call(self, action: Action) -> Steps:
        """Yields an action; returns the answer."""
        moment: Moment = yield action
        late = moment.now - self.now - getattr(action, "seconds", 0.0)
        if late > _MOMENT:
            self.stops.append(late - _MOMENT)
        self.now, self.wall = moment.now, moment.wall
        return moment.answer

    def wake(self) -> Steps:
        """Asks for the time. The first step of a machine, because time has passed since the last one."""
        moment: Moment = yield Sleep(0)
        self.now, self.wall = moment.now, moment.wall

    def decide(self, key: str, value: Mapping[str, Any]) -> Steps:
        """Sets a key that can be set once; returns what stands there then."""
        if (yield from self.call(Put(key, value, self.most, once=True))):
            return value
        stands = yield from self.call(Get(key))
        return value if stands is None else stands

    # Arriving.

    def come(self, mine: Contribution) -> Steps:
        """Announces this process. What it left behind earlier goes first: others may be looking for an absence now."""
        yield from self.wake()
        yield from self.call(Delete(self.keys.absences_of(self.place.process)))
        process, payload = self.place.process, {**mine, "host": self.place.host}
        names = yield from self.call(Read(self.keys.arrivals_of(process), self.most))
        for nonce in sorted({name.partition("/")[0] for name in names}):
            yield from self.call(Delete(self.keys.arrival(process, nonce)))
        self._arriving = True
        yield from self.call(Put(self.keys.arrived(process, self.nonce), {"payload": payload, CAME: self.wall}))

    def arrivals(self) -> Generator[Action, Moment, Arrivals]:
        arrivals = Arrivals((yield from self.call(Read(self.keys.arrivals, self.most))))
        self.seen = arrivals.nonces
        return arrivals

    def give_up_arrival(self, error: errors.RestoreFailedError | errors.RestoreTimeoutError) -> Steps:
        """Gives up the arrival; returns the reply that stands: this error, or what was decided before.

        The error of a process that leaves while process 0 waits for it is not told: process 0 will tell all that it is
        missing, when all others are there. Otherwise those who come a moment later would wait for the ones that left.
        """
        reply = {ERROR: restore_error_to_json(error), BY: self.nonce}
        stands = yield from self.decide(self.keys.reply(self.place.process, self.nonce), reply)
        if stands is reply and (self.place.process == LEADER or isinstance(error, errors.RestoreTimeoutError)):
            yield from self.tell_waiting(reply)
        return stands

    def tell_waiting(self, reply: Mapping[str, Any]) -> Steps:
        """Replies to all who wait in `arrive`, and takes back the arrival of this process.

        The arrival goes after the replies: until then nobody may call this process missing. Process 0 may have come
        and seen the arrival before it went, so it is told as well. A process that has come since this one looked may be
        at its next restore and is not told. A reply to a process that gave up at the same time is removed.
        """
        me, before, reply = self.place.process, self.seen, {**reply, BY: self.nonce}
        standing = (yield from self.arrivals()).standing()
        told = {other: nonce for other, nonce in standing.items() if other != me and before.get(other) == nonce}
        for other, nonce in told.items():
            yield from self.call(Put(self.keys.reply(other, nonce), reply, self.most, once=True))
            yield from self.beat()
        yield from self.call(Delete(self.keys.arrived(me, self.nonce)))
        now = yield from self.arrivals()
        if LEADER not in (me, *told) and LEADER in now.standing():
            told[LEADER] = now.nonces[LEADER]
            yield from self.call(Put(self.keys.reply(LEADER, told[LEADER]), reply, self.most, once=True))
            now = yield from self.arrivals()
        for other, nonce in told.items():
            # Not a reply of process 0, which would take this process for one that has entered its session.
            if now.nonces.get(other) != nonce and ERROR in now.replies.get((other, nonce), {}):
                yield from self.call(Delete(self.keys.reply(other, nonce)))

    def beat(self) -> Steps:
        """Shows those who wait that this process is still at it. Only process 0 is waited for."""
        yield from ()

    def dismiss(self, why: Mapping[str, Any]) -> Steps:
        """Tells those who wait for a session that there is none. Only process 0 opens one."""
        yield from ()

    def end_arrival(self) -> Steps:
        """Removes the arrival and the reply to it, at once."""
        yield from self.call(Delete(self.keys.arrival(self.place.process, self.nonce)))
        self._arriving = False

    def enter(self, session: str) -> None:
        self.id = session
        self.session = SessionKeys(self.keys, session)

    def in_session(self) -> SessionKeys:
        if self.session is None:
            raise RuntimeError("This process has not arrived at a session yet; call `arrive` first.")
        return self.session

    # Leaving, and what is not a meeting.

    def leave(self, error: BaseException | None = None) -> Steps:
        """Decides the meeting that this process will not come to. The last one removes the session's keys."""
        if self._left or not (self._arriving or self.id):
            return
        self._left = True
        yield from self.wake()
        departure = _departure(self, error)
        if not self.id:
            stands = yield from self.give_up_arrival(departure)  # process 0 may have replied meanwhile
            if ERROR in stands:
                yield from self.end_arrival()
                return
            self.enter(stands["id"])
        session, number = self.in_session(), self.next
        value = {ERROR: restore_error_to_json(departure)}
        decided = yield from self.call(Put(session.outcome(number), value, self.most, once=True))
        if not decided and error is not None:  # it may have succeeded without this process's knowledge
            yield from self.call(Put(session.outcome(number + 1), value, self.most, once=True))
        if self._arriving and self.place.process == LEADER:  # it may not have replied to all
            stands = value if decided else (yield from self.call(Get(session.outcome(number)))) or {}
            if ERROR in stands:
                yield from self.dismiss(stands)
        if self._arriving:
            yield from self.end_arrival()
        if (yield from self.call(Count(session.gone))) == self.place.processes:
            yield from self.call(Delete(session.home))

    def report(self, done: Callable[[], int], may_ask: bool = False) -> Generator[Action, Moment, Word]:
        """Publishes how far this process is. Called regularly while it works.

        Returns what there is to know about the next meeting. With `may_ask` that may be that this process is late.
        """
        session, before = self.in_session(), self.now
        yield from self.wake()
        if (late := self.now - before - self.report_every) > _MOMENT:  # it was stopped between two reports
            self.stops.append(late)
        if self._working_on != (self.next, self.phase):
            self._working_on, self._began = (self.next, self.phase), self.now
        if self.now - self._reported >= 0.9 * self.report_every:  # ticks are not quite even
            self._reported = self.now
            self._reports_made += 1
            news = {"phase": self.phase, "done": done(), "number": self._reports_made}
            yield from self.call(Put(session.report(self.place.process), news))
        if self.now - self._looked > self.look_every:
            self._looked = self.now
            if ERROR in ((yield from self.call(Get(session.outcome(self.next)))) or {}):
                return Word.FAILED
        if may_ask and self.now - self._began > self.limits.patience:  # most work ends before the others might ask
            self.late = ((yield from self.call(Get(session.asked(self.next)))) or {}).get("late", 0)
            return Word.ASKED if self.late else Word.NONE
        return Word.NONE

    def hand_in(self, mine: str) -> Generator[Action, Moment, dict[int, str]]:
        """Sends a text to process 0."""
        session = self.in_session()
        yield from self.call(Put(f"{session.handed_in}/{self.place.process}", {"text": mine}))
        yield from self.call(Count(session.handed_in_count))
        return {}

    # Errors and names.

    def timeout(self, missing: Collection[int], heard: Mapping[Any, str]) -> errors.RestoreTimeoutError:
        """Returns the error that names the missing processes with their last reports."""
        phases = {int(process): news for process, news in heard.items() if int(process) in missing}
        unheard = "no report" if self.id else "has not arrived at this restore"
        lines = [f"{text.process(process, self.known_hosts)}: {phases.get(process, unheard)}" for process in missing]
        return errors.RestoreTimeoutError(
            f"gave up in phase {self.phase!r} after {self.now - self._started:.0f} s ({self.limits}); missing:\n  "
            + "\n  ".join(lines)
            + "\nLook for the reason in the log of each missing process; if it is only slow, raise the limit.",
            missing,
            phases,
        )

    def failure(self, process: int, error: str) -> errors.ProcessFailure:
        return errors.ProcessFailure(self.known_hosts.get(process, "unknown host"), self.phase, error)

    def met(self, contributions: Mapping[int, Contribution]) -> None:
        """Remembers the hosts of the processes that have arrived."""
        self.hosts = {process: str(payload["host"]) for process, payload in contributions.items()}
        self._hosts_met.update(self.hosts)

    @property
    def known_hosts(self) -> dict[int, str]:
        return {**self._hosts_met, **self.hosts}


def _departure(member: Member, error: BaseException | None) -> errors.RestoreFailedError | errors.RestoreTimeoutError:
    """Returns the error that the others raise if they wait for a process that has left."""
    if member.unanswered:
        error = ConnectionError(f"the coordination service, on process {LEADER}, did not answer this process")
    if isinstance(error, RESTORE_ERRORS):
        return error
    why = "left the restore early" if error is None else failure_to_json(error)["error"]
    failure = errors.ProcessFailure(member.place.host, member.phase, why)
    return errors.RestoreFailedError({member.place.process: failure})


def silent_at(member: Member, answered: float) -> float:
    """Returns when to give up a service that answered last at `answered`: later than a meeting that fails."""
    grace = GRACE + SPREAD + SILENCE
    # Also a process that wakes after the limit in all gives the service the time to answer.
    in_all = max(member.deadline + grace, answered + member.look_every + SILENCE)
    return min(answered + member.limits.stall + grace, in_all)


def service_is_silent(member: Member, now: float) -> errors.RestoreTimeoutError:
    """Returns the error of a process that the service does not answer. The others may still be answered."""
    member.now, member.unanswered = now, True
    return member.timeout([LEADER], {LEADER: "the coordination service, which runs there, does not answer"})


def take(stands: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a reply or an outcome; raises the error in it."""
    if ERROR in stands:
        raise restore_error_from_json(stands[ERROR])
    return stands


def waiting_for(waiting: Member, missing: Collection[int]) -> str:
    """Returns a line for the log."""
    return f"orbax_ext: {waiting.phase}: waiting for {text.processes(missing, waiting.known_hosts, MAX_NAMES)}"


def clock_offset(delays: Collection[float]) -> float:
    """Returns the seconds that this process's clock is ahead of process 0's, from how late its messages seem to be.

    The difference between sending and receiving includes the time under way, so the smallest one is used. Clocks that
    differ by no more than the duration of a message are taken as equal.
    """
    offset = min(delays, default=0.0)
    return 0.0 if 0 <= offset <= _MESSAGE else offset
