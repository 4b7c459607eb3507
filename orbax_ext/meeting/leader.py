"""The protocol of the meetings: what process 0 does. It gathers, decides, and says who is missing. Pure.

`meeting/protocol.py` has what all processes do.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from orbax_ext import errors
from orbax_ext.meeting import wire
from orbax_ext.meeting.actions import Action, Count, Delete, Get, Log, Moment, Put, Read, Sleep, Steps
from orbax_ext.meeting.arrivals import CAME, Arrivals, Heard, by_process, contributions, last_of, missing_from
from orbax_ext.meeting.protocol import (
    ERROR,
    GRACE,
    HAND_IN_LIMIT,
    LEADER,
    MAX_NAMES,
    MORE,
    ONLY_WAITED,
    RESTORE_ERRORS,
    TOOK,
    Contributions,
    Member,
    Patience,
    take,
    waiting_for,
)
from orbax_ext.meeting.terms import Word
from orbax_ext.meeting.wire import Contribution

PAUSES = (0.002, 0.25)  # seconds: first and longest pause between two looks at the contributions
_PAUSE_FOR_EACH = 0.5e-3  # seconds of the longest pause per process: small jobs look more often
_PART = 0.01  # of the time that it has waited already may the next pause be
_LATE = 1.5  # times what the others needed, after they have come, is a process late
_SILENT = 10  # times `Limits.late` is a process late that reads nothing while the others had nothing to read
_LOOKS = 3  # once a process has failed, the missing ones are given up after this many looks without progress
_SILENT_LOOKS = 2  # looks without a report: then such a process is named too, as it may be dead or stopped


class Leader(Member):
    """Process 0: waits for all, decides, and publishes for the others who is missing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: dict[int, Heard] = {}
        self._published, self._beats = self.now, 0  # when the status was published last, and how often by `beat`
        self._came = (0, 0, self.now)  # the next meeting, how many have come to it, and since when
        self._asked = 0  # the latest meeting to which process 0 has asked those who were late
        self._nonces: dict[int, str] = {}  # of those with whom it opens the session
        self._inside: set[int] = set()  # those of them who were replied to with its id
        self._outside = 0  # how many of the others have been counted as gone
        self._working: tuple[int, Patience] | None = None  # while process 0 works: the next meeting, and its patience
        self.longest_pause = min(PAUSES[1], max(0.01, _PAUSE_FOR_EACH * self.place.processes))

    def arrive(self, mine: Contribution) -> Contributions:
        """Waits until all have arrived, and opens a session with them. Returns what they brought."""
        yield from self.come(mine)
        try:
            arrivals = yield from self._await_arrivals()
        except RESTORE_ERRORS as error:
            outcome = yield from self.give_up_arrival(error)
        else:
            outcome = yield from self._open_session(arrivals)
        yield from self.end_arrival()
        found = wire.unpack(take(outcome))
        self.met(found)
        self.next = 1
        return found

    def _await_arrivals(self) -> Generator[Action, Moment, Arrivals]:
        pause, patience, began, looked = PAUSES[0], Patience(self), self.now, self.now
        patience.note(0)
        before: Collection[int] = ()
        while True:
            arrivals = yield from self.arrivals()
            if own := arrivals.replies.get((LEADER, self.nonce)):
                take(own)  # another process has given up, and told the others
            missing = missing_from(arrivals.standing(), self.place.processes)
            if not missing:
                self.last = last_of(arrivals.came, before)
                return arrivals
            before = arrivals.standing()
            if self.now - looked > self.look_every or patience.expired(self.limits.stall):
                looked = self.now
                absent = yield from self._absent()
                if absent.keys() >= set(missing):  # not before: those who are still to come have to learn it too
                    raise errors.RestoreFailedError(
                        {process: self.failure(process, absent[process]) for process in missing}
                    )
                patience.note(len(before))
                yield from self._publish_status(self.keys.status, missing, patience)
                if patience.expired(self.limits.stall):
                    raise self.timeout(missing, absent)
            yield from self.call(Sleep(pause))
            pause = _longer(pause, self.now - began, self.longest_pause)

    def _absent(self) -> Generator[Action, Moment, dict[int, str]]:
        """Returns the processes that have announced that they will not arrive, with the reason."""
        notes = (yield from self.call(Read(self.keys.absences))).items()
        absent = by_process({self.keys.absent(name): note for name, note in notes})
        return {process: str(note["why"]) for process, note in absent.items()}

    def _open_session(self, arrivals: Arrivals) -> Steps:
        """Replies to each arrival with the id of the session; returns the outcome of the arrival.

        A process may give up meanwhile. Then all others get the error that it has raised.
        """
        yield from self.call(Delete(self.keys.sessions))  # what earlier ones could not remove; nobody is in them now
        self.enter(self.nonce)
        self._nonces = arrivals.nonces
        for process, nonce in arrivals.nonces.items():
            reply = Put(self.keys.reply(process, nonce), _stamped(self, {"id": self.id}), once=True)
            if process != LEADER:
                self._inside.add(process)  # before the call, which an interrupt does not end
                if not (yield from self.call(reply)):
                    self._inside.remove(process)
            yield from self.beat()
        current, inside = (yield from self.arrivals()), {LEADER, *self._inside}
        lost = [p for p, nonce in arrivals.nonces.items() if p not in inside or current.nonces.get(p) != nonce]
        yield from self._count_outside(current)  # before an interrupt of what follows
        outcome = (yield from _error_of(self, lost, arrivals)) if lost else _stamped(self, wire.pack(arrivals.payloads))
        return (yield from self.decide(self.in_session().outcome(0), outcome))

    def dismiss(self, why: Mapping[str, Any]) -> Steps:
        """Replies to the rest that there is no session, if process 0 leaves before it has replied to all."""
        self.seen = self._nonces  # not those who have come to their next restore since
        yield from self.tell_waiting(why)
        yield from self._count_outside((yield from self.arrivals()))

    def _count_outside(self, current: Arrivals) -> Steps:
        """Counts those as gone who are never in this session, each once, however often this is interrupted."""
        for process in [*self._inside]:
            nonce = self._nonces[process]
            reply, left = current.replies.get((process, nonce), {}), current.nonces.get(process) != nonce
            if ERROR in reply or (reply and left):
                self._inside.remove(process)
                if left:  # it has not read the reply, which nobody else would remove
                    yield from self.call(Delete(self.keys.arrival(process, nonce)))
        while self._outside < self.place.processes - 1 - len(self._inside):
            self._outside += 1
            yield from self.call(Count(self.in_session().gone))

    def beat(self) -> Steps:
        """Replies to many processes take long: lets those go on who wait for theirs, or for the outcome."""
        if self.now - self._published > self.look_every / 2:
            self._beats += 1
            yield from self._publish_status(self.keys.status, [])
            if self.id:
                yield from self._publish_status(self.in_session().status, [])

    def end_arrival(self) -> Steps:
        """Removes the status as well."""
        yield from self.call(Delete(self.keys.status))
        yield from super().end_arrival()

    def meet(self, phase: str, mine: Contribution) -> Contributions:
        """Waits until all processes are at this meeting; returns their contributions."""
        session, number, self.phase = self.in_session(), self.next, phase
        yield from self.wake()
        yield from self.call(Put(session.contribution(number, LEADER), {**mine, CAME: self.wall}))
        outcome: Mapping[str, Any]
        try:
            found = yield from self._gather(number)
            yield from self.call(Delete(session.meeting(number - 1)))  # all are here, so all have read it
            outcome = _stamped(self, wire.pack(found))
        except RESTORE_ERRORS as error:
            outcome = {ERROR: wire.restore_error_to_json(error)}
        stands = yield from self.decide(session.outcome(number), outcome)
        found = wire.unpack(take(stands))
        self.next = number + 1
        return found

    def _gather(self, number: int) -> Contributions:
        """Waits for the contributions of all processes; publishes the status for the others."""
        pause, patience, began, looked = PAUSES[0], Patience(self), self.now, self.now
        patience.note((0, self._advance))
        before: Collection[int] = ()
        while True:
            found = yield from self._brought(number)
            missing = missing_from(found, self.place.processes)
            if not missing:
                self.last = last_of({process: own.get(CAME, 0.0) for process, own in found.items()}, before)
                return {
                    process: {key: own[key] for key in own.keys() - {CAME, TOOK, MORE}}
                    for process, own in found.items()
                }
            yield from self._ask_late(found)
            before = found.keys()
            failed = wire.failures_from_json(found, self.hosts, self.phase)
            stall = min(self.limits.stall, self.look_every * _LOOKS) if failed else self.limits.stall
            if self.now - looked > self.look_every or patience.expired(stall):
                looked = self.now
                yield from self._listen()
                patience.note((len(found), self._advance))
                yield from self._publish_status(self.in_session().status, missing, patience)
                if patience.expired(stall):
                    raise self._gave_up(found, missing, failed)
            yield from self.call(Sleep(pause))
            pause = _longer(pause, self.now - began, self.longest_pause)

    def _brought(self, number: int) -> Contributions:
        """Returns the contributions so far; raises what a process that has left decided."""
        found = yield from self.call(Read(self.in_session().meeting(number), self.most))
        take(found.get("out") or {})
        return contributions(found)

    def _gave_up(
        self, found: Mapping[int, Any], missing: list[int], failed: dict[int, errors.ProcessFailure]
    ) -> errors.RestoreFailedError | errors.RestoreTimeoutError:
        """Returns the error that names the missing processes, together with those that have failed already."""
        heard = {process: news.told(self.now) for process, news in self.heard.items()}
        if all(ONLY_WAITED in found[process] for process in failed):
            return self.timeout(missing, heard)
        # Not those that report: they wait for the one that has failed, compile or connect, and read no bytes meanwhile.
        since = self.now - _SILENT_LOOKS * self.look_every
        silent = [p for p in missing if p not in self.heard or self.heard[p].reported < since]
        late = {process: f"no outcome yet, {heard.get(process, 'no report')}" for process in silent}
        return errors.restore_failed(failed | {process: self.failure(process, late[process]) for process in late})

    def report(self, done: Callable[[], int], may_ask: bool = False) -> Generator[Action, Moment, Word]:
        """Publishes how far all are: the others may already be waiting, and the status lets them go on.

        Decides the meeting if no process advances, so that a process that is stuck at work ends too.
        """
        session, reported = self.in_session(), self._reported
        yield from super().report(done)
        if self._reported == reported:  # between two reports
            return (yield from self._asks_itself()) if may_ask else Word.NONE
        yield from self._listen()
        brought = yield from self.call(Read(session.meeting(self.next), self.most))
        found = contributions(brought)
        missing = missing_from(found, self.place.processes)
        yield from self._publish_status(session.status, missing)
        if self._working is None or self._working[0] != self.next:
            self._working = self.next, Patience(self)
        patience = self._working[1]
        # Those that are asked need time to come: if that is this process, it may be as long as one of these rounds.
        asked = self._asked == self.next
        patience.note([len(found), asked, *((news.phase, news.done) for news in self.heard.values())])
        if "out" not in brought and missing and patience.expired(self.limits.stall):
            error = self.timeout(missing, {process: news.told(self.now) for process, news in self.heard.items()})
            yield from self.decide(session.outcome(self.next), {ERROR: wire.restore_error_to_json(error)})
            return Word.FAILED
        if ERROR in (brought.get("out") or {}):
            return Word.FAILED
        return Word.ASKED if may_ask and (yield from self._ask_late(found)) else Word.NONE

    def _asks_itself(self) -> Generator[Action, Moment, Word]:
        if self.now - self._began <= self.limits.patience:
            return Word.NONE
        found = contributions((yield from self.call(Read(self.in_session().meeting(self.next), self.most))))
        return Word.ASKED if (yield from self._ask_late(found)) else Word.NONE

    def _ask_late(self, found: Mapping[int, Contribution]) -> Generator[Action, Moment, bool]:
        """Asks those who are late to come to the next meeting without their work; returns whether they are asked.

        It asks again when fewer are late: what those could not read may be there now. Those are late who need much
        longer than the others, or read nothing while these had nothing to do, or, if most are late, for long.
        """
        if self._came[:2] != (self.next, len(found)):
            self._came = (self.next, len(found), self.now)
        missing, asked = missing_from(found, self.place.processes), self._asked == self.next
        if asked and len(missing) >= self.late:
            return True
        waited = self.now - self._came[2]
        if not missing or not found or any(TOOK not in own for own in found.values()):
            return asked
        needed = [own[TOOK] for own in found.values() if own[TOOK]]
        most, silent = self.limits.stall / 2, _SILENT * self.limits.patience
        more = statistics.median(own.get(MORE, 0.0) for own in found.values())  # nothing is lost before that
        usual = more + (_LATE * statistics.median(needed) if needed else silent)
        if many := len(missing) > len(found):
            usual = silent = most
        # Not so long that the restore fails before anybody is asked.
        if waited <= max(self.limits.patience, min(usual, most)):
            return asked
        if many or not needed:
            yield from self._listen()
            quiet = min(self.now - self.heard[process].at if process in self.heard else waited for process in missing)
            if quiet <= silent:
                return asked
        self._asked, self.late = self.next, len(missing)
        yield from self.call(Put(self.in_session().asked(self.next), {"asked": missing[:MAX_NAMES], "late": self.late}))
        return True

    def hand_in(self, mine: str) -> Generator[Action, Moment, dict[int, str]]:
        """Waits a few seconds for the texts of all processes and returns them."""
        session, pause = self.in_session(), PAUSES[0]
        yield from super().hand_in(mine)
        # Not so long that others name this process, because it has not come to the next restore.
        deadline = self.now + min(HAND_IN_LIMIT, self.limits.stall)
        while (yield from self.call(Get(session.handed_in_count))) < self.place.processes and self.now < deadline:
            yield from self.call(Sleep(pause))
            pause = min(PAUSES[1], pause * 1.5)
        sent = by_process((yield from self.call(Read(session.handed_in))))
        return {process: str(own["text"]) for process, own in sent.items()}

    @property
    def _advance(self) -> int:
        """A number that grows as long as any process reports progress."""
        return sum(news.done for news in self.heard.values()) + len(self.heard)

    def _listen(self) -> Steps:
        """Reads the progress that the processes have published."""
        for process, report in by_process((yield from self.call(Read(self.in_session().reports)))).items():
            before, news = self.heard.get(process), Heard(self.now, self.now, **report)
            if before is None or before.number != news.number:
                at = before.at if before and (before.phase, before.done) == (news.phase, news.done) else self.now
                self.heard[process] = dataclasses.replace(news, at=at)

    def _publish_status(self, key: str, missing: list[int], patience: Patience | None = None) -> Steps:
        """Publishes the missing processes, and a number that grows as long as any process advances."""
        named = missing[:MAX_NAMES]
        news = {process: self.heard[process].told(self.now) for process in named if process in self.heard}
        found = self.place.processes - len(missing)
        advance = [found, self._advance, self._beats]
        self._published = self.now
        yield from self.call(Put(key, {"advance": advance, "missing": named, "news": news}))
        if patience is not None and patience.time_to_log():
            yield from self.call(Log(waiting_for(self, missing)))


def _error_of(leader: Leader, lost: list[int], arrivals: Arrivals) -> Steps:
    """Waits a moment for the error that a process that has given up tells the others."""
    patience = Patience(leader)
    while not patience.expired(GRACE):
        current = yield from leader.arrivals()
        for process in (LEADER, *lost):
            reply = current.replies.get((process, arrivals.nonces[process]), {})
            if ERROR in reply:
                return reply
        yield from leader.call(Sleep(PAUSES[1]))
        yield from leader.beat()
    why = dict.fromkeys(lost, "gave up before the others had arrived")
    return {ERROR: wire.restore_error_to_json(leader.timeout(lost, why))}


def _stamped(leader: Leader, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with the time by the clock of process 0 and the last process to arrive."""
    return {**value, "last": leader.last, "now": leader.wall}


def _longer(pause: float, waited: float, longest: float) -> float:
    """Returns the next pause. Who waits for long looks less often: it notices the end at most 1 % later."""
    return min(PAUSES[1], max(longest, _PART * waited), pause * 1.5)
