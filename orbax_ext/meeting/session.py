"""Meetings of all processes on JAX's coordination service: each brings a contribution, and missing ones are named.

A meeting is never a collective: it works while devices are busy, it has time limits, and its errors name the missing
processes. `meeting/protocol.py` is the protocol, without I/O; this module drives it. Most calls to the service have no
time limit of their own (if process 0 is stopped, so is the service), so they are made in a thread that is abandoned
when the service stops answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import socket
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
from absl import logging

from orbax_ext import errors
from orbax_ext.meeting.actions import Steps
from orbax_ext.meeting.board import Board, Client, LocalClient
from orbax_ext.meeting.driver import run, with_service
from orbax_ext.meeting.follower import Follower
from orbax_ext.meeting.keys import PREFIX, SubjectKeys
from orbax_ext.meeting.leader import Leader
from orbax_ext.meeting.protocol import (
    GRACE,
    HAND_IN_LIMIT,
    LEADER,
    LEAVE_LIMIT,
    ONLY_WAITED,
    clock_offset,
    service_is_silent,
    silent_at,
)
from orbax_ext.meeting.terms import Limits as Limits
from orbax_ext.meeting.terms import Place, Word
from orbax_ext.meeting.threads import GivenUpError, StopTicking, Ticker, in_thread, watched, when_closed
from orbax_ext.meeting.wire import Contribution, failure_to_json, failures_from_json
from orbax_ext.redact import redact
from orbax_ext.upstream import runtime

T = TypeVar("T")
Waited = Callable[[str, float, int | None], None]  # phase of a meeting, seconds waited, the process that arrived last

_sessions = itertools.count()  # of this process
_hosts_met: dict[int, str] = {}  # of earlier sessions, to name a process that does not arrive at a later one
_attempts: dict[str, str] = {}  # what the processes have agreed to try just now, by subject
_under_way: weakref.WeakSet[Session] = weakref.WeakSet()  # of this process


class Session:
    """The meetings of one restore: first `arrive`, then any number of `meet`. Use it in a `with` block.

    Args:
      client: The coordination service.
      process: Index of this process, of `processes` in all.
      subject: Name of the session; sessions with different subjects do not affect each other. A process is in at most
        one session of a subject at a time.
      limits: How long to wait.
      done: Returns how far this process is, in bytes; the others wait as long as it grows.
      attempt: What the processes have agreed to try; what `tell_absent` announced in another attempt does not count.
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
        attempt: str = "",
    ) -> None:
        place = Place(process, processes, socket.gethostname(), attempt)
        role = Leader if process == LEADER else Follower
        self._member = role(place, subject, limits, _new_nonce(), time.monotonic(), _hosts_met)
        self._board = Board(client)
        self._done = done
        self._waited = waited
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None  # that works
        self._on_asked: Callable[[int], None] | None = None
        self._stopped = False  # the task was cancelled by this session
        self.worked = 0  # bytes done that `done` does not count

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):  # no event loop runs
            self._loop = asyncio.get_running_loop()
            when_closed(self._loop, _leave_abandoned)
        _under_way.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _under_way.discard(self)
        self.leave(error)

    def arrive(self, mine: Contribution) -> dict[int, Contribution]:
        """Waits until all processes have arrived with the same subject; returns their contributions."""
        with self._waiting():
            return self._drive(self._member.arrive(mine))

    def meet(self, phase: str, mine: Contribution | None = None) -> dict[int, Contribution]:
        """Waits until all processes are at this meeting; returns their contributions.

        Every process must hold the same meetings in the same order. `phase` names the meeting in messages.
        """
        self._member.phase = phase
        with self._waiting():
            return self._drive(self._member.meet(phase, dict(mine or {})))

    async def together(self, phase: str, work: Awaitable[T]) -> T:
        """Does this process's work and meets; returns the result if the work succeeded on all processes.

        Otherwise raises the same `RestoreFailedError` on all of them.
        """
        return (await self.together_telling(phase, work, dict))[0]

    async def together_telling(
        self,
        phase: str,
        work: Awaitable[T],
        contribution: Callable[[], Contribution],
        asked: Callable[[int], None] | None = None,
    ) -> tuple[T, dict[int, Contribution]]:
        """Does the same as `together`, and also returns what `contribution` returned after the work on each process.

        `asked` is called, with the number of processes that are late, on one for which the others do not want to wait
        any longer; it may be called several times. The work may go on.

        An interrupt is not caught: the process leaves the session, and that ends the meeting for the others. Work that
        nobody waits for any more, because the meeting has failed, is cancelled.
        """
        self._member.phase, self._on_asked = phase, asked
        before, self._loop = self._loop, asyncio.get_running_loop()
        when_closed(self._loop, _leave_abandoned)
        self._task, self._stopped = asyncio.current_task(), False
        mine: Contribution = {}
        try:
            try:
                with self.reporting():
                    result = await work
                mine = contribution()
            except asyncio.CancelledError:
                if not self._stopped or (task := self._task) is None:
                    raise
                task.uncancel()
            except Exception as error:
                mine = failure_to_json(error)
            finally:
                self._task = self._on_asked = None
            outcomes = await in_thread(self.meet, phase, mine)
        finally:
            self._loop = before  # a session that was opened without a loop outlives this one
        failed = failures_from_json(outcomes, self.hosts, phase)
        if failed:
            raise errors.restore_failed(failed)
        return result, outcomes

    @property
    def id(self) -> str:
        """The id of the session; empty until all have arrived."""
        return self._member.id

    @property
    def home(self) -> str:
        """The key below which all keys of the session are; they are removed with it."""
        return self._member.in_session().home

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each process."""
        return self._member.hosts

    @property
    def phase(self) -> str:
        """The phase that this process is in."""
        return self._member.phase

    @property
    def clock_offset(self) -> float:
        """Seconds that this process's wall clock is ahead of process 0's, estimated from messages."""
        return clock_offset(self._member.delays) if isinstance(self._member, Follower) else 0.0

    def bytes_done(self) -> dict[int, int]:
        """Returns the bytes done by each process according to its last report. Only process 0 has these."""
        heard = self._member.heard.copy() if isinstance(self._member, Leader) else {}
        return {process: news.done for process, news in heard.items()}

    def reporting(self) -> Ticker:
        """Publishes the progress of this process as long as a `with` block lasts."""
        # A process that may be asked to come looks more often, so that the others do not wait for its next look.
        every = self._member.report_every
        return Ticker(self._tick, every=every if self._on_asked is None else every / 4)

    async def barrier(self, name: str) -> None:
        """Waits at Orbax's barrier on the coordination service. All processes enter it shortly after a meeting."""
        stall = self._member.limits.stall
        wait = functools.partial(
            runtime.sync_global_processes,
            f"{PREFIX}.{self.id}.{name}",
            timeout=math.ceil(stall),
            processes=set(range(self._member.place.processes)),
        )
        try:
            with self._waiting("barrier"):
                await in_thread(wait, limit=stall + GRACE)
        except Exception as error:  # it names at most two processes; a meeting of the remaining ones names all
            mine = {**failure_to_json(error), ONLY_WAITED: True}
            outcomes = await in_thread(self.meet, name, mine)
            raise errors.restore_failed(failures_from_json(outcomes, self.hosts, name)) from None

    def hand_in(self, mine: str) -> dict[int, str]:
        """Sends a text to process 0, which waits a few seconds for all and returns the texts; the others return {}.

        Not a meeting: no process waits for process 0, and process 0 goes on without processes that send nothing.
        """
        return watched(
            lambda: run(self._member.hand_in(mine), self._board), lambda: self._board.last_answer() + HAND_IN_LIMIT
        )

    def leave(self, error: BaseException | None = None) -> None:
        """Publishes that this process has left; the last one removes the session's keys. Never raises."""
        self._board.close()  # a thread that is still at a meeting must not write keys that no process would remove
        board = Board(self._board.client)
        board.answered = self._board.answered  # do not wait again for a service that does not answer
        try:
            watched(lambda: run(self._member.leave(error), board), lambda: board.last_answer() + LEAVE_LIMIT)
        except Exception as problem:
            logging.warning("orbax_ext: could not remove the keys of a meeting: %s", redact(repr(problem)))

    def _drive(self, steps: Steps) -> Any:
        """Runs a machine of the protocol; raises `RestoreTimeoutError` if the service stops answering."""
        self._board.answered = time.monotonic()

        def deadline() -> float:
            return 0.0 if _abandoned(self) else silent_at(self._member, self._board.last_answer())

        try:
            return watched(lambda: run(steps, self._board), deadline)
        except GivenUpError:
            raise service_is_silent(self._member, time.monotonic()) from None

    def _tick(self) -> None:
        if _abandoned(self):
            raise StopTicking
        asked = self._on_asked
        word = run(self._member.report(lambda: self._done() + self.worked, asked is not None), self._board)
        if word is Word.ASKED and asked is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(asked, self._member.late)
        if word is Word.FAILED and self._loop is not None:

            def stop_work() -> None:
                if self._task is not None:
                    self._stopped = self._task.cancel()

            self._loop.call_soon_threadsafe(stop_work)
            raise StopTicking

    @contextlib.contextmanager
    def _waiting(self, phase: str = "") -> Iterator[None]:
        """Passes the seconds that a meeting takes and the last process to arrive to `waited`."""
        came, self._member.last = time.monotonic(), None
        try:
            yield
        finally:
            if self._waited is not None:
                self._waited(phase or self.phase, time.monotonic() - came, self._member.last)


def _abandoned(session: Session) -> bool:
    """Returns whether Orbax has closed the loop under a restore, which raises nothing there from 0.12.0 on."""
    return session._loop is not None and session._loop.is_closed()


def _leave_abandoned() -> None:
    """What a process has brought must not be taken for its next restore."""
    for session in [session for session in list(_under_way) if _abandoned(session)]:
        _under_way.discard(session)
        session.leave(InterruptedError("the restore was interrupted"))


def _new_nonce() -> str:
    """Returns a text that no other session has, and that is greater than those of earlier sessions of this process."""
    return f"{next(_sessions):08d}-{uuid.uuid4().hex}"


def open_session(
    subject: str, limits: Limits, done: Callable[[], int] = lambda: 0, waited: Waited | None = None
) -> Session:
    """Returns a session of all processes of this job."""
    client = runtime.coordination_client() if jax.process_count() > 1 else LocalClient()
    place = jax.process_index(), jax.process_count()
    return Session(client, *place, subject, limits, done, waited, _attempts.get(subject, ""))


def last_answer() -> float:
    """Returns when the service last answered a session of this process that is under way; 0.0 if there is none."""
    return max((session._board.answered for session in list(_under_way)), default=0.0)


def gather(subject: str, mine: Contribution, limits: Limits) -> dict[int, Contribution]:
    """Holds one meeting of all processes of this job; returns their contributions."""
    with open_session(subject, limits) as session:
        return session.arrive(mine)


@contextlib.contextmanager
def attempting(subject: str, attempt: str) -> Iterator[None]:
    """Sets what the processes have agreed to try in sessions of a subject. Attempts of all processes have one name."""
    _attempts[subject] = attempt
    try:
        yield
    finally:
        _attempts.pop(subject, None)


def tell_absent(subject: str, error: BaseException) -> None:
    """Announces to those who wait in `arrive` that this process will not arrive at a session of that subject.

    That holds for what is `attempting` now, or until `withdraw_absent`.
    """
    key = _absence(subject)
    with_service(lambda board: board.put(key, {"why": failure_to_json(error)["error"]}))


def withdraw_absent(subject: str) -> None:
    """Withdraws what `tell_absent` announced, after that session has ended, in whatever way."""
    key = _absence(subject)
    with_service(lambda board: board.delete(key))


def _absence(subject: str) -> str:
    return SubjectKeys(subject, _attempts.get(subject, "")).absence(jax.process_index())
