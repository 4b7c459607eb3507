"""Meetings of all processes on JAX's coordination service: who is here, what each has to say, who is missing.

A meeting is never a collective: it works while devices are busy, it has time limits, and it can say who is missing.
Process 0 gathers and publishes one summary, so the cost is a few messages per process however many there are.

How processes that may have restored a different number of times find each other: each one announces itself under
`in/<process>` with a nonce, and waits for a reply addressed to that nonce. Process 0 replies once all have announced
themselves, with a new id under which the later meetings of this session are held. No counter has to agree, and
nothing that an earlier, failed session left behind can be taken for a reply.

Waiting is bounded by progress: processes publish how far they are, and waiting ends when nobody has advanced for
`stall` seconds, or after `total` seconds. Most calls to the service have no time limit of their own (if process 0 is
stopped, so is the service), so they are made in a thread that is given up when the service falls silent.

Keys: `orbax_ext/<subject>/in|reply|absent|status/...` until all have arrived, then `orbax_ext/session/<id>/...`, which
the last process to leave removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
from absl import logging

from orbax_ext import errors
from orbax_ext.meeting import wire
from orbax_ext.meeting.board import MAX_VALUE, Board, Client, LonelyClient, Payload
from orbax_ext.meeting.threads import GivenUpError, StopTicking, Ticker, in_thread, watched
from orbax_ext.meeting.wire import failures, from_verdict, to_payload, to_verdict
from orbax_ext.redact import scrub
from orbax_ext.upstream import runtime

_LEADER = 0
_PREFIX = "orbax_ext"
_PAUSES = (0.002, 0.25)  # first and longest pause of the gathering process between two looks
_PAUSE_FOR_EACH = 0.5e-3  # seconds of the longest pause for each process: few are looked for more often
_LOG_EVERY = 30.0
_LOOKS = 3  # looks without progress after which those who are still missing are not waited for once one has failed
_GRACE = 3.0  # the others wait this much longer than process 0, whose verdict names the missing
_SILENCE = 5.0  # and this much longer again for a service that does not answer
_LEAVE_LIMIT = 5.0
_HAND_IN_LIMIT = 5.0
_MESSAGE = 0.1  # seconds that a message of process 0 may well take
_MAX_NAMES = 16  # processes that a message names
_ONLY_WAITED = "only waited"  # marks the error of a process that did nothing but wait for others
_GAVE_UP = {"gave up": True}  # stands where the arrival of a process was that waits no more

_CAME = "came"  # when a process came to a meeting, by its own clock

T = TypeVar("T")
Waited = Callable[[str, float, int | None], None]  # phase of a meeting, seconds waited, who came last

_hosts_met: dict[int, str] = {}  # of earlier sessions, to name a process that does not come to a later one


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait: `stall` seconds without anybody's progress, `total` seconds in all."""

    stall: float = 300.0
    total: float | None = None

    def __str__(self) -> str:
        return f"stall_timeout={self.stall:g}" + ("" if self.total is None else f", timeout={self.total:g}")


@dataclasses.dataclass(frozen=True)
class Heard:
    """The latest news of a process."""

    phase: str
    done: int
    at: float

    def __str__(self) -> str:
        return f"last in phase {self.phase!r}, {self.done} bytes done, {time.monotonic() - self.at:.0f} s ago"


class Session:
    """The meetings of one restore: `arrive` first, then `meet` as often as needed. Use it in a `with` block.

    Args:
      client: The coordination service.
      process: Index of this process, of `processes` in all.
      subject: What the session is about; sessions of different subjects do not see each other.
      limits: How long to wait.
      done: Tells how far this process is, in bytes; others go on waiting as long as it grows.
      waited: Is told of every meeting: its phase, how long this process waited, and who came last.
    """

    def __init__(
        self,
        client: Client,
        process: int,
        processes: int,
        subject: str,
        limits: Limits,
        done: Callable[[], int] = lambda: 0,
        waited: Waited | None = None,
    ) -> None:
        self._board = Board(client)
        self._process = process
        self._processes = processes
        self._subject = f"{_PREFIX}/{subject}"
        self._limits = limits
        self._done = done
        self._waited = waited
        self._last: int | None = None  # who came last to the meeting that ended last
        self._delays: list[float] = []  # of process 0's messages, by its clock and this process's
        self._started = time.monotonic()
        self._deadline = math.inf if limits.total is None else self._started + limits.total
        self._nonce = uuid.uuid4().hex
        self._meetings = 0
        self._phase = "arrive"
        self._heard: dict[int, Heard] = {}
        # With many processes each looks less often, so that the service is asked no more in all.
        self._look_every = min(10.0, max(2.0, processes / 100), max(limits.stall / 4, 0.5))
        self._most = MAX_VALUE * processes  # characters of a summary
        self._arriving = False
        self._left = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.worked = 0  # bytes done beside those that `done` tells
        self.id = ""
        self.hosts: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.leave(error)

    def arrive(self, mine: Payload) -> dict[int, Payload]:
        """Waits until all processes have arrived with the same subject; returns what each brought."""
        with self._waiting():
            return self._watched(functools.partial(self._arrive, {**mine, "host": socket.gethostname()}))

    def meet(self, phase: str, mine: Payload | None = None) -> dict[int, Payload]:
        """Waits until all processes are at this meeting; returns what each brought.

        Every process must hold the same meetings in the same order. `phase` names it in messages.
        """
        self._phase = phase
        with self._waiting():
            return self._watched(functools.partial(self._meet, dict(mine or {})))

    async def together(self, phase: str, work: Awaitable[T]) -> T:
        """Does a piece of work and meets: returns its result if it succeeded on all processes.

        Otherwise raises the same `RestoreFailedError` on all of them.
        """
        return (await self.together_telling(phase, work, dict))[0]

    async def together_telling(
        self, phase: str, work: Awaitable[T], word: Callable[[], Payload]
    ) -> tuple[T, dict[int, Payload]]:
        """As `together`; each process brings its word when its work is done, and has everybody's afterwards."""
        self._phase = phase
        self._loop = asyncio.get_running_loop()
        mine: Payload
        try:
            with self.reporting():
                result = await work
            mine = word()
        except Exception as error:
            mine = to_payload(error)
        except BaseException as error:  # interrupted: tell the others, but do not stay for the meeting
            self._tell_interrupted(to_payload(error))
            raise
        outcomes = await in_thread(self.meet, phase, mine)
        failed = failures(outcomes, self.hosts, phase)
        if failed:
            raise errors.restore_failed(failed)
        return result, outcomes

    @property
    def phase(self) -> str:
        """What this process is at."""
        return self._phase

    def bytes_done(self) -> dict[int, int]:
        """On process 0, how far each process is as far as it has been heard."""
        return {process: news.done for process, news in self._heard.copy().items()}

    def reporting(self) -> Ticker:
        """Publishes this process's progress as long as a `with` block lasts."""
        return Ticker(self._tick, every=max(1.0, self._processes / 200))

    async def barrier(self, name: str) -> None:
        """Orbax's barrier on the coordination service, entered by all processes a moment after a meeting."""
        wait = functools.partial(
            runtime.sync_global_processes,
            f"{_PREFIX}.{self.id}.{name}",
            timeout=math.ceil(self._limits.stall),
            processes=set(range(self._processes)),
        )
        try:
            with self._waiting("barrier"):
                await in_thread(wait, limit=self._limits.stall + _GRACE)
        except Exception as error:  # which names two processes at most: a meeting of those who are left names all
            mine = {**to_payload(error), _ONLY_WAITED: True}
            outcomes = await in_thread(self.meet, name, mine)
            raise errors.restore_failed(failures(outcomes, self.hosts, name)) from None

    def hand_in(self, mine: str) -> dict[int, str]:
        """Leaves word for process 0, which returns what all have left in a few seconds; the others return nothing.

        Not a meeting: nobody waits for process 0, and process 0 does without those who leave no word.
        """
        home = f"{self._home}/handed_in"

        def work() -> dict[int, str]:
            self._board.put(f"{home}/{self._process}", {"text": mine})
            self._board.count(f"{home}_count")
            if self._process != _LEADER:
                return {}
            deadline, pause = time.monotonic() + _HAND_IN_LIMIT, _PAUSES[0]
            while self._board.get(f"{home}_count") < self._processes and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(_PAUSES[1], pause * 1.5)
            return {process: str(word["text"]) for process, word in self._board.read(home).items()}

        return watched(work, lambda: self._board.answered + _HAND_IN_LIMIT)

    def leave(self, error: BaseException | None = None) -> None:
        """Tells the others that this process is gone; the last one removes the session's keys. Never raises."""
        self._board.close()  # a thread that is still at a meeting must not write what nobody would remove
        if self._left or (not self.id and not self._arriving):
            return
        self._left = True
        board = Board(self._board.client)
        board.answered = self._board.answered  # a service that is silent already is not waited for again
        why = "" if error is None else to_payload(error)["error"]
        note: dict[str, Any] = {"why": why}
        if isinstance(error, (errors.RestoreFailedError, errors.RestoreTimeoutError)):
            note["verdict"] = to_verdict(error)

        def go() -> None:
            if not self.id:
                self._withdraw(board, why)
                return
            board.put(f"{self._home}/left/{self._process}", note, self._most)
            if board.count(f"{self._home}/gone") == self._processes:
                board.delete(self._home)

        try:
            watched(go, lambda: board.answered + _LEAVE_LIMIT)
        except Exception as error:
            logging.warning("orbax_ext: could not tidy up after a meeting: %s", scrub(str(error)))

    # Arriving and meeting, as seen by both sides.

    def _arrive(self, mine: Payload) -> dict[int, Payload]:
        home, reply = f"{self._subject}/in", f"{self._subject}/reply/{self._process}"
        self._board.delete(reply)  # to an arrival that was given up
        self._board.put(f"{home}/{self._process}", {"nonce": self._nonce, "payload": mine, _CAME: time.time()})
        self._arriving = True
        try:
            if self._process == _LEADER:
                self._call_together(home)
            else:
                self.id = self._await(f"{reply}/{self._nonce}", f"{self._subject}/status", home)["id"]
        except errors.RestoreError:
            self._withdraw(self._board, "")
            raise
        self._board.delete(reply)
        found = wire.unpack(self._await(f"{self._home}/out/0", f"{self._home}/status", home))
        self.hosts = {process: str(payload["host"]) for process, payload in found.items()}
        _hosts_met.update(self.hosts)
        return found

    def _withdraw(self, board: Board, why: str) -> None:
        """Nobody may count on this process any more, but those who still wait shall know that it was there."""
        home = f"{self._subject}/in"
        if why and self._process == _LEADER:  # without it nobody would tell the others until they give up
            failure = errors.ProcessFailure(socket.gethostname(), "arrive", why)
            self._reply_to_all(board, {"verdict": to_verdict(errors.RestoreFailedError({_LEADER: failure}))})
        board.put(f"{home}/{self._process}", _GAVE_UP)
        if all(arrival == _GAVE_UP for arrival in board.read(home).values()):
            board.delete(home)
        board.delete(f"{self._subject}/reply/{self._process}")
        self._arriving = False

    def _meet(self, mine: Payload) -> dict[int, Payload]:
        self._meetings += 1
        home, out = f"{self._home}/in/{self._meetings}", f"{self._home}/out/{self._meetings}"
        self._board.put(f"{home}/{self._process}", {**mine, _CAME: time.time()})
        if self._process == _LEADER:
            try:
                found = self._gather(home)
            except (errors.RestoreFailedError, errors.RestoreTimeoutError) as error:
                self._publish(out, {"verdict": to_verdict(error)})
                raise
            self._board.delete(home)
            self._board.delete(f"{self._home}/out/{self._meetings - 1}")  # all are here, so all have read it
            found = {process: _without_stamp(payload) for process, payload in found.items()}
            self._publish(out, self._stamped(wire.pack(found)))
            return found
        return wire.unpack(self._await(out, f"{self._home}/status", home))

    # Process 0's side.

    def _call_together(self, home: str) -> None:
        """Gathers the arrivals and gives each a reply: the session's id, or who is missing."""
        try:
            arrivals = self._gather(home)
        except (errors.RestoreFailedError, errors.RestoreTimeoutError) as error:
            self._reply_to_all(self._board, {"verdict": to_verdict(error)})
            raise
        finally:
            self._board.delete(f"{self._subject}/status")
        self.id = uuid.uuid4().hex
        brought = {process: arrival["payload"] for process, arrival in arrivals.items()}
        self._publish(f"{self._home}/out/0", self._stamped(wire.pack(brought)))
        self._board.delete(home)
        for process, arrival in arrivals.items():
            self._board.put(f"{self._subject}/reply/{process}/{arrival['nonce']}", self._stamped({"id": self.id}))

    def _reply_to_all(self, board: Board, reply: Payload) -> None:
        home = f"{self._subject}/in"
        replies = {
            process: f"{self._subject}/reply/{process}/{arrival['nonce']}"
            for process, arrival in self._standing(board.read(home)).items()
            if process != self._process
        }
        for key in replies.values():
            board.put(key, reply, self._most)
        # One who has given up meanwhile may have removed its replies before this one came.
        still_there = self._standing(board.read(home))
        for key in [key for process, key in replies.items() if process not in still_there]:
            board.delete(key)

    def _publish(self, key: str, value: Payload) -> None:
        self._board.put(key, value, self._most)

    def _gather(self, home: str) -> dict[int, Any]:
        """Waits for every process's contribution under `home`, telling the others how it goes."""
        clock = _Clock(self._deadline)
        clock.note((0, self._advance))
        pause, longest = _PAUSES[0], min(_PAUSES[1], max(0.01, _PAUSE_FOR_EACH * self._processes))
        looked = time.monotonic()
        before: Collection[int] = ()
        while True:
            found = self._standing(self._board.read(home))
            missing = self._not_in(found)
            if not missing:
                self._last = _came_last(found, before)
                return found
            before = found.keys()
            failed = failures(found, self.hosts, self._phase) if self.id else {}
            stall = min(self._limits.stall, self._look_every * _LOOKS) if failed else self._limits.stall
            if time.monotonic() - looked > self._look_every or clock.expired(stall):
                looked = time.monotonic()
                self._raise_if_gone()
                clock.note((len(found), self._tell_status(missing)))
                clock.log_waiting(self._phase, self._names(missing))
            if clock.expired(stall):
                raise self._gave_up(found, missing, failed)
            time.sleep(pause)
            pause = min(longest, pause * 1.5)

    def _gave_up(
        self, found: Mapping[int, Any], missing: list[int], failed: dict[int, errors.ProcessFailure]
    ) -> errors.RestoreFailedError | errors.RestoreTimeoutError:
        """Those who are missing, or if others have failed already, these first."""
        heard = {process: str(news) for process, news in self._heard.items()}
        if all(_ONLY_WAITED in found[process] for process in failed):
            return self._timeout(missing, heard)
        late = {process: f"no outcome yet, {heard.get(process, 'nothing heard')}" for process in missing}
        failed |= {process: errors.ProcessFailure(self._host(process), self._phase, late[process]) for process in late}
        return errors.restore_failed(failed)

    def _tell_status(self, missing: list[int]) -> int:
        """Publishes who is missing, and a number that grows as long as anybody advances; returns the number."""
        self._listen()
        named = missing[:_MAX_NAMES]
        news = {process: str(self._heard[process]) for process in named if process in self._heard}
        self._board.put(f"{self._status_home}/status", {"advance": self._advance, "missing": named, "news": news})
        return self._advance

    @property
    def _advance(self) -> int:
        """Grows as long as anybody is heard to advance."""
        return sum(news.done for news in self._heard.values()) + len(self._heard)

    def _listen(self) -> None:
        """Reads the processes' progress."""
        if self.id:
            for process, report in self._board.read(f"{self._home}/progress").items():
                before = self._heard.get(process)
                if before is None or (before.phase, before.done) != (report["phase"], report["done"]):
                    self._heard[process] = Heard(report["phase"], report["done"], time.monotonic())

    # The others' side.

    def _await(self, key: str, status: str, home: str) -> Any:
        """Waits for process 0 to set `key`; `home` is where the contributions to this meeting are."""
        clock = _Clock(self._deadline + _GRACE)
        news: dict[Any, str] = {}
        while True:
            found = self._board.wait(key, self._look_every, self._most)
            if found is not None:
                if "verdict" in found:
                    raise from_verdict(found["verdict"])
                self._last = found.get("last")
                self._delays.append(time.time() - found.get("now", time.time()))
                return found
            report = self._board.get(status)
            try:
                self._raise_if_gone()
            except errors.RestoreError:
                if self._board.get(key) is None:
                    raise
                continue  # all have met since this process looked, and one of them has gone on its way
            if report is not None:
                news = report["news"]
                clock.note((report["advance"], report["missing"]))
                clock.log_waiting(self._phase, self._names(report["missing"]))
            else:
                clock.log_waiting(self._phase, self._names([_LEADER]))
            if clock.expired(self._limits.stall + _GRACE):
                raise self._timeout(self._not_in(self._board.read(home)) or [_LEADER], news)

    # Both sides.

    @contextlib.contextmanager
    def _waiting(self, phase: str = "") -> Iterator[None]:
        """Tells, if anybody wants to know, how long a meeting takes and who came last."""
        came, self._last = time.monotonic(), None
        try:
            yield
        finally:
            if self._waited is not None:
                self._waited(phase or self._phase, time.monotonic() - came, self._last)

    def _stamped(self, value: Payload) -> Payload:
        """A message from process 0, with the time by its clock and who came last."""
        return {**value, "last": self._last, "now": time.time()}

    @property
    def clock_offset(self) -> float:
        """How many seconds this process's wall clock is ahead of process 0's, as far as messages can tell.

        A message's stamp is older than its arrival by the time it took, so the quickest one is believed. Clocks that
        differ by no more than a message may take are taken to agree.
        """
        offset = min(self._delays, default=0.0)
        return 0.0 if 0 <= offset <= _MESSAGE else offset

    @staticmethod
    def _standing(found: Mapping[int, Any]) -> dict[int, Any]:
        """The contributions that have not been taken back."""
        return {process: value for process, value in found.items() if value != _GAVE_UP}

    def _not_in(self, found: Collection[int]) -> list[int]:
        return [process for process in range(self._processes) if process not in found]

    def _tick(self) -> None:
        """What a process does every so often while it works."""
        if self._loop is not None and self._loop.is_closed():
            # A KeyboardInterrupt ends Orbax's event loop, and what ran in it, without a word (0.12.0 and later).
            self.leave(InterruptedError("the restore was interrupted"))
            raise StopTicking
        self._tell_progress()
        if self._process == _LEADER:  # the others may be waiting already, and want to know whether to go on
            self._tell_status(self._not_in(self._board.read(f"{self._home}/in/{self._meetings + 1}")))

    def _tell_interrupted(self, mine: Payload) -> None:
        key = f"{self._home}/in/{self._meetings + 1}/{self._process}"
        with contextlib.suppress(Exception):  # those who wait will find that this process has left
            watched(lambda: self._board.put(key, mine), lambda: self._board.answered + _LEAVE_LIMIT)

    def _tell_progress(self) -> None:
        self._board.put(
            f"{self._home}/progress/{self._process}", {"phase": self._phase, "done": self._done() + self.worked}
        )

    def _raise_if_gone(self) -> None:
        """Raises if a process has left the session, or will not come to it."""
        gone = self._board.read(f"{self._home}/left" if self.id else f"{self._subject}/absent", self._most)
        for note in gone.values():
            if "verdict" in note:  # it has left for a reason that is everybody's
                raise from_verdict(note["verdict"])
        if gone:
            raise errors.RestoreFailedError(
                {
                    process: errors.ProcessFailure(
                        self._host(process), self._phase, str(note.get("why") or "left the restore early")
                    )
                    for process, note in gone.items()
                }
            )

    def _watched(self, function: Callable[[], T]) -> T:
        """Runs a function that talks to the service, and gives up if the service falls silent."""
        self._board.answered = time.monotonic()
        limit = self._limits.stall + _GRACE + _SILENCE
        try:
            return watched(function, lambda: self._board.answered + limit)
        except GivenUpError:
            raise self._silent_service() from None

    def _silent_service(self) -> errors.RestoreTimeoutError:
        return self._timeout([_LEADER], {_LEADER: "the coordination service, which runs there, does not answer"})

    def _timeout(self, missing: Collection[int], heard: Mapping[Any, str]) -> errors.RestoreTimeoutError:
        phases = {int(process): text for process, text in heard.items() if int(process) in missing}
        unheard = "nothing heard" if self.id else "has not come to this restore"
        lines = [f"process {self._names([process])}: {phases.get(process, unheard)}" for process in missing]
        waited = time.monotonic() - self._started
        return errors.RestoreTimeoutError(
            f"gave up in phase {self._phase!r} after {waited:.0f} s ({self._limits}); missing:\n  "
            + "\n  ".join(lines)
            + "\nThe logs of these processes say why; if they are only slow, raise the limit.",
            missing,
            phases,
        )

    def _names(self, processes: Collection[int]) -> str:
        hosts = {**_hosts_met, **self.hosts}
        shown = [f"{p} ({hosts[p]})" if p in hosts else str(p) for p in list(processes)[:_MAX_NAMES]]
        return ", ".join(shown) + (" and more" if len(processes) > len(shown) else "")

    def _host(self, process: int) -> str:
        return self.hosts.get(process) or _hosts_met.get(process, "unknown host")

    @property
    def _home(self) -> str:
        return f"{_PREFIX}/session/{self.id}"

    @property
    def _status_home(self) -> str:
        return self._home if self.id else self._subject


def open_session(
    subject: str, limits: Limits, done: Callable[[], int] = lambda: 0, waited: Waited | None = None
) -> Session:
    """A session of all processes of this job."""
    client = runtime.coordination_client() if jax.process_count() > 1 else LonelyClient()
    return Session(client, jax.process_index(), jax.process_count(), subject, limits, done, waited)


def gather(subject: str, mine: Payload, limits: Limits) -> dict[int, Payload]:
    """One meeting of all processes of this job: waits for all, returns what each brought."""
    with open_session(subject, limits) as session:
        return session.arrive(mine)


def tell_absent(subject: str, error: BaseException) -> None:
    """Tells those who wait in `arrive` that this process will not come to the next session of that subject."""
    if jax.process_count() > 1:
        key = f"{_PREFIX}/{subject}/absent/{jax.process_index()}"
        Board(runtime.coordination_client()).put(key, {"why": to_payload(error)["error"]})


def withdraw_absent(subject: str) -> None:
    """Takes `tell_absent` back, once all have ended the session that it was about."""
    if jax.process_count() > 1:
        Board(runtime.coordination_client()).delete(f"{_PREFIX}/{subject}/absent/{jax.process_index()}")


def _came_last(found: Mapping[int, Mapping[str, Any]], before: Collection[int]) -> int:
    """Of those who came since process 0 looked before, the one that came last by its own clock."""
    new = [process for process in found if process not in before]
    return max(new, key=lambda process: (found[process].get(_CAME, 0.0), process))


def _without_stamp(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in payload.items() if key != _CAME}


class _Clock:
    """Tells when waiting has lasted long enough, and when to log that one waits."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._advanced = self._logged = time.monotonic()
        self._seen: object = None

    def note(self, state: object) -> None:
        if state != self._seen:
            self._seen, self._advanced = state, time.monotonic()

    def expired(self, stall: float) -> bool:
        now = time.monotonic()
        return now - self._advanced > stall or now > self._deadline

    def log_waiting(self, phase: str, missing: str) -> None:
        if time.monotonic() - self._logged > _LOG_EVERY:
            self._logged = time.monotonic()
            logging.info("orbax_ext: %s: waiting for process %s", phase, missing)
