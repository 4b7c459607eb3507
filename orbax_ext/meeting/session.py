"""Meetings of all processes on JAX's coordination service: each brings a contribution, and missing ones are named.

A meeting is never a collective: it works while devices are busy, it has time limits, and its errors name the missing
processes. Process 0 gathers the contributions and publishes one summary, so that the number of messages per process is
small and does not depend on the number of processes.

Processes may have restored a different number of times before they meet. So each one announces itself under
`in/<process>` with a nonce and waits for a reply to that nonce. When all have announced themselves, process 0 replies
with a new id, under which the later meetings of this session are held. No counter has to agree, and keys of an
earlier, failed session are never taken for a reply.

Waiting is bounded by progress: processes publish how far they are, and waiting ends when no process has advanced for
`stall` seconds, or after `total` seconds. Most calls to the service have no time limit of their own (if process 0 is
stopped, so is the service), so they are made in a thread that is abandoned when the service stops answering.

Keys: `orbax_ext/<subject>/in|reply|absent|status/...` until all have arrived, then `orbax_ext/session/<id>/...`. The
last process to leave removes the latter.
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
from orbax_ext import text as text_lib
from orbax_ext.meeting import wire
from orbax_ext.meeting.board import MAX_VALUE, Board, Client, LocalClient
from orbax_ext.meeting.threads import GivenUpError, StopTicking, Ticker, in_thread, watched
from orbax_ext.meeting.wire import (
    Contribution,
    failure_to_json,
    failures_from_json,
    restore_error_from_json,
    restore_error_to_json,
)
from orbax_ext.redact import redact
from orbax_ext.upstream import runtime

_LEADER = 0
_PREFIX = "orbax_ext"
_PAUSES = (0.002, 0.25)  # seconds: first and longest pause of process 0 between two looks at the contributions
_PAUSE_FOR_EACH = 0.5e-3  # seconds of the longest pause per process: small jobs look more often
_LOG_EVERY = 30.0  # seconds
_LOOKS = 3  # once a process has failed, the missing ones are given up after this many looks without progress
_GRACE = 3.0  # seconds that the others wait longer than process 0, whose error names the missing processes
_SILENCE = 5.0  # seconds more that all wait for a service that does not answer
_LEAVE_LIMIT = 5.0  # seconds to remove keys: the restore is over, so nobody waits for it
_HAND_IN_LIMIT = 5.0  # seconds that process 0 waits for reports, which a restore does not need
_MESSAGE = 0.1  # seconds that a message of process 0 usually takes at most
_MAX_NAMES = 16  # processes that a message names
_ONLY_WAITED = "only waited"  # marks the error of a process that did nothing but wait for others
_GAVE_UP = {"gave up": True}  # replaces the arrival of a process that no longer waits

_CAME = "came"  # when a process arrived at a meeting, by its own clock

T = TypeVar("T")
Waited = Callable[[str, float, int | None], None]  # phase of a meeting, seconds waited, the process that arrived last

_hosts_met: dict[int, str] = {}  # of earlier sessions, to name a process that does not arrive at a later one


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait: `stall` seconds without progress of any process, `total` seconds in all."""

    stall: float = 300.0
    total: float | None = None

    def __str__(self) -> str:
        return f"stall_timeout={self.stall:g}" + ("" if self.total is None else f", timeout={self.total:g}")


@dataclasses.dataclass(frozen=True)
class Heard:
    """The last report of a process: its phase, bytes done, and when process 0 read the report."""

    phase: str
    done: int
    at: float

    def __str__(self) -> str:
        return f"last in phase {self.phase!r}, {self.done} bytes done, {time.monotonic() - self.at:.0f} s ago"


class Session:
    """The meetings of one restore: first `arrive`, then any number of `meet`. Use it in a `with` block.

    Args:
      client: The coordination service.
      process: Index of this process, of `processes` in all.
      subject: Name of the session; sessions with different subjects do not affect each other.
      limits: How long to wait.
      done: Returns how far this process is, in bytes; the others wait as long as it grows.
      waited: Called after every meeting with its phase, the seconds this process waited and the last to arrive.
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
        self._last: int | None = None  # the last to arrive at the latest meeting
        self._delays: list[float] = []  # of process 0's messages: sent by its clock, received by this process's
        self._started = time.monotonic()
        self._deadline = math.inf if limits.total is None else self._started + limits.total
        self._nonce = uuid.uuid4().hex
        self._meetings = 0
        self._phase = "arrive"
        self._heard: dict[int, Heard] = {}
        # With many processes each one looks less often, so that the load on the service stays the same.
        self._look_every = min(10.0, max(2.0, processes / 100), max(limits.stall / 4, 0.5))
        self._most = MAX_VALUE * processes  # characters of a summary
        self._arriving = False
        self._left = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.worked = 0  # bytes done that `done` does not count
        self.id = ""
        self.hosts: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.leave(error)

    def arrive(self, mine: Contribution) -> dict[int, Contribution]:
        """Waits until all processes have arrived with the same subject; returns their contributions."""
        with self._waiting():
            return self._watched(functools.partial(self._arrive, {**mine, "host": socket.gethostname()}))

    def meet(self, phase: str, mine: Contribution | None = None) -> dict[int, Contribution]:
        """Waits until all processes are at this meeting; returns their contributions.

        Every process must hold the same meetings in the same order. `phase` names the meeting in messages.
        """
        self._phase = phase
        with self._waiting():
            return self._watched(functools.partial(self._meet, dict(mine or {})))

    async def together(self, phase: str, work: Awaitable[T]) -> T:
        """Does this process's work and meets; returns the result if the work succeeded on all processes.

        Otherwise raises the same `RestoreFailedError` on all of them.
        """
        return (await self.together_telling(phase, work, dict))[0]

    async def together_telling(
        self, phase: str, work: Awaitable[T], contribution: Callable[[], Contribution]
    ) -> tuple[T, dict[int, Contribution]]:
        """Does the same as `together`, and also returns what `contribution` returned after the work on each process."""
        self._phase = phase
        self._loop = asyncio.get_running_loop()
        mine: Contribution
        try:
            with self.reporting():
                result = await work
            mine = contribution()
        except Exception as error:
            mine = failure_to_json(error)
        except BaseException as error:  # interrupted: report it, but do not wait for the meeting
            self._tell_interrupted(failure_to_json(error))
            raise
        outcomes = await in_thread(self.meet, phase, mine)
        failed = failures_from_json(outcomes, self.hosts, phase)
        if failed:
            raise errors.restore_failed(failed)
        return result, outcomes

    @property
    def phase(self) -> str:
        """The phase that this process is in."""
        return self._phase

    def bytes_done(self) -> dict[int, int]:
        """Returns the bytes done by each process according to its last report. Only process 0 has these."""
        return {process: news.done for process, news in self._heard.copy().items()}

    def reporting(self) -> Ticker:
        """Publishes the progress of this process as long as a `with` block lasts."""
        return Ticker(self._tick, every=max(1.0, self._processes / 200))

    async def barrier(self, name: str) -> None:
        """Waits at Orbax's barrier on the coordination service. All processes enter it shortly after a meeting."""
        wait = functools.partial(
            runtime.sync_global_processes,
            f"{_PREFIX}.{self.id}.{name}",
            timeout=math.ceil(self._limits.stall),
            processes=set(range(self._processes)),
        )
        try:
            with self._waiting("barrier"):
                await in_thread(wait, limit=self._limits.stall + _GRACE)
        except Exception as error:  # it names at most two processes; a meeting of the remaining ones names all
            mine = {**failure_to_json(error), _ONLY_WAITED: True}
            outcomes = await in_thread(self.meet, name, mine)
            raise errors.restore_failed(failures_from_json(outcomes, self.hosts, name)) from None

    def hand_in(self, mine: str) -> dict[int, str]:
        """Sends a text to process 0, which waits a few seconds for all and returns the texts; the others return {}.

        Not a meeting: no process waits for process 0, and process 0 goes on without processes that send nothing.
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
            return {process: str(sent["text"]) for process, sent in self._board.read(home).items()}

        return watched(work, lambda: self._board.answered + _HAND_IN_LIMIT)

    def leave(self, error: BaseException | None = None) -> None:
        """Publishes that this process has left; the last one removes the session's keys. Never raises."""
        self._board.close()  # a thread that is still at a meeting must not write keys that no process would remove
        if self._left or (not self.id and not self._arriving):
            return
        self._left = True
        board = Board(self._board.client)
        board.answered = self._board.answered  # do not wait again for a service that does not answer
        why = "" if error is None else failure_to_json(error)["error"]
        departure: dict[str, Any] = {"why": why}
        if isinstance(error, (errors.RestoreFailedError, errors.RestoreTimeoutError)):
            departure["restore_error"] = restore_error_to_json(error)

        def go() -> None:
            if not self.id:
                self._withdraw(board, why)
                return
            board.put(f"{self._home}/left/{self._process}", departure, self._most)
            if board.count(f"{self._home}/gone") == self._processes:
                board.delete(self._home)

        try:
            watched(go, lambda: board.answered + _LEAVE_LIMIT)
        except Exception as error:
            logging.warning("orbax_ext: could not remove the keys of a meeting: %s", redact(str(error)))

    # Arriving and meeting, on process 0 and on the others.

    def _arrive(self, mine: Contribution) -> dict[int, Contribution]:
        home, reply = f"{self._subject}/in", f"{self._subject}/reply/{self._process}"
        self._board.delete(reply)  # an old one, to an arrival that was given up
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
        """Marks the arrival of this process as given up, so that those who still wait do not call it missing."""
        home = f"{self._subject}/in"
        if why and self._process == _LEADER:  # otherwise the others would wait until they give up
            error = errors.RestoreFailedError({_LEADER: errors.ProcessFailure(socket.gethostname(), "arrive", why)})
            self._reply_to_all(board, {"restore_error": restore_error_to_json(error)})
        board.put(f"{home}/{self._process}", _GAVE_UP)
        if all(arrival == _GAVE_UP for arrival in board.read(home).values()):
            board.delete(home)
        board.delete(f"{self._subject}/reply/{self._process}")
        self._arriving = False

    def _meet(self, mine: Contribution) -> dict[int, Contribution]:
        self._meetings += 1
        home, out = f"{self._home}/in/{self._meetings}", f"{self._home}/out/{self._meetings}"
        self._board.put(f"{home}/{self._process}", {**mine, _CAME: time.time()})
        if self._process == _LEADER:
            try:
                found = self._gather(home)
            except (errors.RestoreFailedError, errors.RestoreTimeoutError) as error:
                self._publish(out, {"restore_error": restore_error_to_json(error)})
                raise
            self._board.delete(home)
            self._board.delete(f"{self._home}/out/{self._meetings - 1}")  # all are here, so all have read it
            found = {process: _without_stamp(payload) for process, payload in found.items()}
            self._publish(out, self._stamped(wire.pack(found)))
            return found
        return wire.unpack(self._await(out, f"{self._home}/status", home))

    # On process 0.

    def _call_together(self, home: str) -> None:
        """Gathers the arrivals and replies to each: with the session's id, or with the error that names the missing."""
        try:
            arrivals = self._gather(home)
        except (errors.RestoreFailedError, errors.RestoreTimeoutError) as error:
            self._reply_to_all(self._board, {"restore_error": restore_error_to_json(error)})
            raise
        finally:
            self._board.delete(f"{self._subject}/status")
        self.id = uuid.uuid4().hex
        brought = {process: arrival["payload"] for process, arrival in arrivals.items()}
        self._publish(f"{self._home}/out/0", self._stamped(wire.pack(brought)))
        self._board.delete(home)
        for process, arrival in arrivals.items():
            self._board.put(f"{self._subject}/reply/{process}/{arrival['nonce']}", self._stamped({"id": self.id}))

    def _reply_to_all(self, board: Board, reply: Contribution) -> None:
        home = f"{self._subject}/in"
        replies = {
            process: f"{self._subject}/reply/{process}/{arrival['nonce']}"
            for process, arrival in self._standing(board.read(home)).items()
            if process != self._process
        }
        for key in replies.values():
            board.put(key, reply, self._most)
        # A process that gave up meanwhile may have removed its replies before this one was set.
        still_there = self._standing(board.read(home))
        for key in [key for process, key in replies.items() if process not in still_there]:
            board.delete(key)

    def _publish(self, key: str, value: Contribution) -> None:
        self._board.put(key, value, self._most)

    def _gather(self, home: str) -> dict[int, Any]:
        """Waits for the contributions of all processes under `home`; publishes the status for the others."""
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
            failed = failures_from_json(found, self.hosts, self._phase) if self.id else {}
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
        """Returns the error that names the missing processes, together with those that have failed already."""
        heard = {process: str(news) for process, news in self._heard.items()}
        if all(_ONLY_WAITED in found[process] for process in failed):
            return self._timeout(missing, heard)
        late = {process: f"no outcome yet, {heard.get(process, 'no report')}" for process in missing}
        failed |= {process: errors.ProcessFailure(self._host(process), self._phase, late[process]) for process in late}
        return errors.restore_failed(failed)

    def _tell_status(self, missing: list[int]) -> int:
        """Publishes the missing processes and the total advance; returns the advance."""
        self._listen()
        named = missing[:_MAX_NAMES]
        news = {process: str(self._heard[process]) for process in named if process in self._heard}
        self._board.put(f"{self._status_home}/status", {"advance": self._advance, "missing": named, "news": news})
        return self._advance

    @property
    def _advance(self) -> int:
        """A number that grows as long as any process reports progress."""
        return sum(news.done for news in self._heard.values()) + len(self._heard)

    def _listen(self) -> None:
        """Reads the progress that the processes have published."""
        if self.id:
            for process, report in self._board.read(f"{self._home}/progress").items():
                before = self._heard.get(process)
                if before is None or (before.phase, before.done) != (report["phase"], report["done"]):
                    self._heard[process] = Heard(report["phase"], report["done"], time.monotonic())

    # On the other processes.

    def _await(self, key: str, status: str, home: str) -> Any:
        """Waits for process 0 to set `key`; `home` is where the contributions to this meeting are."""
        clock = _Clock(self._deadline + _GRACE)
        news: dict[Any, str] = {}
        while True:
            found = self._board.wait(key, self._look_every, self._most)
            if found is not None:
                if "restore_error" in found:
                    raise restore_error_from_json(found["restore_error"])
                self._last = found.get("last")
                self._delays.append(time.time() - found.get("now", time.time()))
                return found
            report = self._board.get(status)
            try:
                self._raise_if_gone()
            except errors.RestoreError:
                if self._board.get(key) is None:
                    raise
                continue  # all have met since this process looked, and one of them has left since
            if report is not None:
                news = report["news"]
                clock.note((report["advance"], report["missing"]))
                clock.log_waiting(self._phase, self._names(report["missing"]))
            else:
                clock.log_waiting(self._phase, self._names([_LEADER]))
            if clock.expired(self._limits.stall + _GRACE):
                raise self._timeout(self._not_in(self._board.read(home)) or [_LEADER], news)

    # On all processes.

    @contextlib.contextmanager
    def _waiting(self, phase: str = "") -> Iterator[None]:
        """Passes the seconds that a meeting takes and the last process to arrive to `waited`."""
        came, self._last = time.monotonic(), None
        try:
            yield
        finally:
            if self._waited is not None:
                self._waited(phase or self._phase, time.monotonic() - came, self._last)

    def _stamped(self, value: Contribution) -> Contribution:
        """Returns a message of process 0 with the time by its clock and the last process to arrive."""
        return {**value, "last": self._last, "now": time.time()}

    @property
    def clock_offset(self) -> float:
        """Seconds that this process's wall clock is ahead of process 0's, estimated from messages.

        The difference between sending and receiving includes the time under way, so the smallest one is used. Clocks
        that differ by no more than the duration of a message are taken as equal.
        """
        offset = min(self._delays, default=0.0)
        return 0.0 if 0 <= offset <= _MESSAGE else offset

    @staticmethod
    def _standing(found: Mapping[int, Any]) -> dict[int, Any]:
        """Returns the contributions that have not been withdrawn."""
        return {process: value for process, value in found.items() if value != _GAVE_UP}

    def _not_in(self, found: Collection[int]) -> list[int]:
        return [process for process in range(self._processes) if process not in found]

    def _tick(self) -> None:
        """Publishes progress, and on process 0 the status. Called regularly while a process works."""
        if self._loop is not None and self._loop.is_closed():
            # From Orbax 0.12.0 on, a KeyboardInterrupt closes the event loop without an error in what ran there.
            self.leave(InterruptedError("the restore was interrupted"))
            raise StopTicking
        self._tell_progress()
        if self._process == _LEADER:  # the others may already be waiting: the status lets them go on
            self._tell_status(self._not_in(self._board.read(f"{self._home}/in/{self._meetings + 1}")))

    def _tell_interrupted(self, mine: Contribution) -> None:
        key = f"{self._home}/in/{self._meetings + 1}/{self._process}"
        with contextlib.suppress(Exception):  # those who wait see that this process has left
            watched(lambda: self._board.put(key, mine), lambda: self._board.answered + _LEAVE_LIMIT)

    def _tell_progress(self) -> None:
        self._board.put(
            f"{self._home}/progress/{self._process}", {"phase": self._phase, "done": self._done() + self.worked}
        )

    def _raise_if_gone(self) -> None:
        """Raises if a process has left the session, or has announced that it will not arrive."""
        gone = self._board.read(f"{self._home}/left" if self.id else f"{self._subject}/absent", self._most)
        for departure in gone.values():
            if "restore_error" in departure:  # the error is raised on all processes
                raise restore_error_from_json(departure["restore_error"])
        if gone:
            raise errors.RestoreFailedError(
                {
                    process: errors.ProcessFailure(
                        self._host(process), self._phase, str(departure.get("why") or "left the restore early")
                    )
                    for process, departure in gone.items()
                }
            )

    def _watched(self, function: Callable[[], T]) -> T:
        """Runs a function that calls the service; raises `RestoreTimeoutError` if the service stops answering."""
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
        unheard = "no report" if self.id else "has not arrived at this restore"
        hosts = self._known_hosts
        lines = [f"{text_lib.process(process, hosts)}: {phases.get(process, unheard)}" for process in missing]
        waited = time.monotonic() - self._started
        return errors.RestoreTimeoutError(
            f"gave up in phase {self._phase!r} after {waited:.0f} s ({self._limits}); missing:\n  "
            + "\n  ".join(lines)
            + "\nLook for the reason in the log of each missing process; if it is only slow, raise the limit.",
            missing,
            phases,
        )

    def _names(self, processes: Collection[int]) -> str:
        return text_lib.processes(processes, self._known_hosts, _MAX_NAMES)

    def _host(self, process: int) -> str:
        return self._known_hosts.get(process, "unknown host")

    @property
    def _known_hosts(self) -> dict[int, str]:
        return {**_hosts_met, **self.hosts}

    @property
    def _home(self) -> str:
        return f"{_PREFIX}/session/{self.id}"

    @property
    def _status_home(self) -> str:
        return self._home if self.id else self._subject


def open_session(
    subject: str, limits: Limits, done: Callable[[], int] = lambda: 0, waited: Waited | None = None
) -> Session:
    """Returns a session of all processes of this job."""
    client = runtime.coordination_client() if jax.process_count() > 1 else LocalClient()
    return Session(client, jax.process_index(), jax.process_count(), subject, limits, done, waited)


def gather(subject: str, mine: Contribution, limits: Limits) -> dict[int, Contribution]:
    """Holds one meeting of all processes of this job; returns their contributions."""
    with open_session(subject, limits) as session:
        return session.arrive(mine)


def tell_absent(subject: str, error: BaseException) -> None:
    """Announces to those who wait in `arrive` that this process will not arrive at the next session of that subject."""
    if jax.process_count() > 1:
        key = f"{_PREFIX}/{subject}/absent/{jax.process_index()}"
        Board(runtime.coordination_client()).put(key, {"why": failure_to_json(error)["error"]})


def withdraw_absent(subject: str) -> None:
    """Withdraws what `tell_absent` announced, after all processes have ended that session."""
    if jax.process_count() > 1:
        Board(runtime.coordination_client()).delete(f"{_PREFIX}/{subject}/absent/{jax.process_index()}")


def _came_last(found: Mapping[int, Mapping[str, Any]], before: Collection[int]) -> int:
    """Returns the process that arrived last by its own clock, among those that process 0 had not seen `before`."""
    new = [process for process in found if process not in before]
    return max(new, key=lambda process: (found[process].get(_CAME, 0.0), process))


def _without_stamp(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in payload.items() if key != _CAME}


class _Clock:
    """Decides when waiting has lasted too long, and when to log that this process waits."""

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
            logging.info("orbax_ext: %s: waiting for %s", phase, missing)
