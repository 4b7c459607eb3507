"""A simulated process: it restores some times in sequence, and does what its faults say.

`Process.drive` and `Process._restore` do what `orbax_ext.meeting.session.Session` does with threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

from orbax_ext import errors
from orbax_ext.meeting import wire
from orbax_ext.meeting.actions import Action, Delete, Put, Steps
from orbax_ext.meeting.board import CLOSE_LIMIT, STOPPED
from orbax_ext.meeting.follower import Follower
from orbax_ext.meeting.keys import SubjectKeys
from orbax_ext.meeting.leader import Leader
from orbax_ext.meeting.protocol import HAND_IN_LIMIT, LEADER, LEAVE_LIMIT, MORE, TOOK, service_is_silent, silent_at
from orbax_ext.meeting.refusal import decision
from orbax_ext.meeting.terms import Limits, Place, Word
from orbax_ext.meeting.threads import JOIN_LIMIT
from tests.simulation.plans import CANCEL, FORGOTTEN, QUIET, Fault, Plan
from tests.simulation.world import GONE, Host, Task, World

SUBJECT = "restore"
FINAL = 1000  # the number of the restore that follows when all faults are over
QUIET_PART = 0.7  # of the limit that a quiet process works
ASKS_EVERY = 0.25  # seconds between two looks of a process at work whether it is late
_CHECK = 0.5  # seconds between two checks whether the service still answers

Role: TypeAlias = Leader | Follower
Program: TypeAlias = Generator[Callable[[Callable[[Any], None]], None], Any, Any]


class SilentServiceError(Exception):
    """The service did not answer in time."""


class InterruptError(Exception):
    """The restore of this process was interrupted."""


class OtherTreeError(Exception):
    """The processes do not ask for the same."""


_EXPECTED = (errors.RestoreFailedError, errors.RestoreTimeoutError, InterruptError, OtherTreeError, SilentServiceError)


@dataclasses.dataclass(frozen=True)
class Record:
    """How one restore of one process ended."""

    process: int
    restore: int
    session: str
    error: Exception | None
    overtime: float  # the longest wait at a meeting after any process advanced last
    overdue: float  # the longest wait at a meeting after the limit in all
    waited: float  # the last wait at a meeting; 0 if it ended at work
    began: float  # when the process came
    ended: float  # when it returned or failed; it had not left by then
    seconds: float  # that the restore took
    payloads: tuple[Any, ...]  # what the processes brought to each meeting
    reports: Mapping[int, str] | None  # of all processes, on process 0; None if it did not come to that
    reporting: float  # seconds that it took to exchange the reports

    @property
    def named(self) -> frozenset[int]:
        if isinstance(self.error, errors.RestoreFailedError):
            return frozenset(self.error.failures)
        if isinstance(self.error, errors.RestoreTimeoutError):
            return frozenset(self.error.missing)
        return frozenset()

    def __str__(self) -> str:
        how = "restored" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return f"process {self.process}, restore {self.restore}, session {self.session or '-'}: {how}"


class Process:
    """One process and what it does."""

    def __init__(self, world: World, plan: Plan, number: int) -> None:
        self.host = Host(world, number)
        self.records: list[Record] = []
        self.left_keys = False  # it could not remove its keys, as the service was silent
        self.unexpected: list[Exception] = []  # that no process can expect, whatever goes wrong
        self.finished = False
        self._world = world
        self._plan = plan
        self._number = number
        self._done = 0
        self._sessions = 0
        self._hosts_met: dict[int, str] = {}
        self._tasks: list[Task] = []
        self._member: Role | None = None  # until its restore is over
        self._overtime = self._overdue = self._waited = 0.0
        self._payloads: list[Any] = []
        self._reports: Mapping[int, str] | None = None
        self._reporting = 0.0

    def start(self, program: Program) -> None:
        self.finished = False
        self._resume(program, None)

    def _resume(self, program: Program, result: Any) -> None:
        try:
            wait = program.throw(result) if isinstance(result, Exception) else program.send(result)
        except StopIteration:
            self.finished = True
            return
        wait(lambda answer: self._resume(program, answer))

    # Programs.

    def faulty(self) -> Program:
        """Restores as often as the plan says."""
        for restore in range(self._plan.restores):
            faults = self._plan.faults_of(self._number, restore)
            yield self._sleep(self._world.random.uniform(0, 0.5))
            if "late" in faults:
                yield self._sleep(self._plan.stall + faults["late"].seconds)
            if "absent" in faults or FORGOTTEN in faults:
                yield from self._stay_away(restore, withdraws=FORGOTTEN not in faults)
            elif "never" not in faults:
                yield from self._restore(restore, faults)
            if "twice" in faults:
                yield from self._restore(restore, {})

    def final(self) -> Program:
        """Restores once, without a fault. The others look for a process whose absence still stands before it comes."""
        forgot = FORGOTTEN in self._plan.kinds(self._number)
        yield self._sleep(self._world.random.uniform(0, self._plan.stall / 2 if forgot else 0.5))
        yield from self._restore(FINAL, {})

    def _stay_away(self, restore: int, withdraws: bool) -> Program:
        key = SubjectKeys(SUBJECT, _attempt(restore)).absence(self._number)
        with contextlib.suppress(SilentServiceError, RuntimeError):
            yield from self.drive(_call(Put(key, {"why": "no such step"})), _after(60))
            yield self._sleep(3 * self._plan.stall + 10)
            if withdraws:
                yield from self.drive(_call(Delete(key)), _after(60))

    def _restore(self, restore: int, faults: dict[str, Fault]) -> Program:
        self._begin_faults(faults)
        self._sessions += 1
        nonce = f"{self._sessions:08d}-{self._number}-{self._world.random.randrange(10**9)}"
        place = Place(self._number, self._plan.processes, f"host{self._number}", _attempt(restore))
        role = Leader if self._number == LEADER else Follower
        limits = Limits(self._plan.stall, self._plan.total, self._plan.late)
        member = self._member = role(place, SUBJECT, limits, nonce, self.host.clock, self._hosts_met)
        self._tasks, self._payloads, self._reports = [], [], None
        self._overtime = self._overdue = self._waited = self._reporting = 0.0
        error: Exception | None = None
        began = self._world.now
        try:
            yield from self._meetings(member, restore, faults)
        except Exception as raised:
            error = raised
            self._expect(raised)
        ended = self._world.now
        answered = max((task.answered for task in self._tasks), default=self._world.now)
        self._member = None
        for task in self._tasks:
            task.abandoned = True
        closed = self._world.now + CLOSE_LIMIT
        while any(task.writing for task in self._tasks) and self._world.now < closed:
            yield self._sleep(0.02)
        try:
            yield from self.drive(member.leave(error), _after(LEAVE_LIMIT), answered)
        except SilentServiceError:
            self.left_keys = True
        except Exception as problem:
            self._world.note(self.host, f"could not leave: {problem}")
            self._expect(problem)
        record = Record(
            self._number,
            restore,
            member.id,
            error,
            self._overtime,
            self._overdue,
            self._waited,
            began,
            ended,
            self._world.now - began,
            tuple(self._payloads),
            self._reports,
            self._reporting,
        )
        self.records.append(record)
        self._world.note(self.host, str(record))

    def _expect(self, error: Exception) -> None:
        """Collects an error that shows a defect: neither one of a restore nor of a service that is gone."""
        gone = isinstance(error, RuntimeError) and str(error) == GONE and self._world.dead is not None
        if not gone and not isinstance(error, _EXPECTED):
            self.unexpected.append(error)

    def _meetings(self, member: Role, restore: int, faults: dict[str, Fault]) -> Program:
        tree = "other" if "other tree" in faults else "tree"
        brought = {"tree": tree, "restore": restore, "by": self._number}
        arrivals = yield from self._wait(member, member.arrive(brought), faults.get("interrupt arrival"))
        self._payloads.append(arrivals)
        if len({own["tree"] for own in arrivals.values()}) > 1:
            raise OtherTreeError(str(sorted((process, own["tree"]) for process, own in arrivals.items())))
        for number in range(1, self._plan.meetings + 1):
            mine = {"number": number, "session": member.id, "by": self._number}
            now = {kind: f for kind, f in faults.items() if f.meeting == number}
            began = self._world.now
            if CANCEL in now:
                self.host.after(now[CANCEL].seconds, functools.partial(self._refuse, member, number))
            mine["late"] = "failed share" in now or (yield from self._work(member, now))
            if not math.isinf(self._plan.late):
                mine[TOOK] = 0.0 if mine["late"] else self._world.now - began
                mine[MORE] = self._other_work(restore, number)
            if "error" in faults and faults["error"].meeting == number:
                mine |= wire.failure_to_json(OSError("disk gone"))
            found = yield from self._wait(member, member.meet(f"work {number}", mine), now.get("interrupt meeting"))
            self._payloads.append(found)
            if failed := wire.failures_from_json(found, member.hosts, f"work {number}"):
                raise errors.restore_failed(failed)
        yield from self._hand_in(member)

    def _other_work(self, restore: int, number: int) -> float:
        """Returns the seconds for which this process has other work: mostly none."""
        choice = random.Random(f"more {self._plan.seed} {self._number} {restore} {number}")
        return choice.choice([0.0, 0.0, choice.uniform(0.0, self._plan.stall)])

    def _refuse(self, member: Role, number: int) -> None:
        """Lets a meeting fail, as `refusal.refuse` does, unless this process has been there or has left."""
        if member is self._member and member.next == number:
            self._tasks.append(Task(self.host, decision(member), lambda result: None))

    def _hand_in(self, member: Role) -> Program:
        """Sends a report to process 0. As in a restore, an error here is not one of the restore."""
        began = self._world.now
        try:
            self._reports = yield from self.drive(
                member.hand_in(report(member.id, self._number)), _after(HAND_IN_LIMIT)
            )
        except SilentServiceError:
            self.left_keys = True  # its report may be written when the session has been removed
        except Exception as error:
            self._expect(error)
        self._reporting = self._world.now - began

    def _work(self, member: Role, faults: dict[str, Fault]) -> Program:
        """Works for a while; returns whether this process is asked to come without its work, and can."""
        seconds = self._world.random.uniform(0, self._plan.stall * 0.4)
        if {"slow", "endless", "stuck"} & set(faults):
            seconds = (1000 if {"endless", "stuck"} & set(faults) else 3) * self._plan.stall
        elif QUIET in faults:
            seconds = QUIET_PART * self._plan.stall
        elif "late share" in faults or "stalled share" in faults:
            seconds = (3 if "late share" in faults else 1000) * self._plan.stall
        advances = not {"stuck", "stalled share"} & set(faults)
        self._waited = 0.0
        alone = {"slow", "endless", "stuck", QUIET} & set(faults) and not {"late share", "stalled share"} & set(faults)
        may_ask = not math.isinf(self._plan.late) and not alone
        ticker: Task | None = None
        word = Word.NONE

        def reported(result: Any) -> None:
            nonlocal word
            word = result if isinstance(result, Word) else Word.NONE
            if isinstance(result, Exception):
                self._expect(result)

        end = self._world.now + seconds
        # One that is slow as well is quiet at first: without progress for all of its work it would be stuck.
        quiet = self._world.now + QUIET_PART * self._plan.stall if QUIET in faults else -math.inf
        while self._world.now < end:
            yield self._sleep(min(ASKS_EVERY if may_ask else 1.0, end - self._world.now))
            if advances and self._world.now > quiet:
                self._done += 1
                self._world.advanced = self._world.now
            if ticker is None or not ticker.running:
                ticker = Task(self.host, member.report(lambda: self._done, may_ask), reported)
                self._tasks.append(ticker)
            if "interrupt" in faults or word is not Word.NONE:
                break
        join = self._world.now + JOIN_LIMIT
        while ticker is not None and ticker.running and self._world.now < join:
            yield self._sleep(0.05)
        if "interrupt" in faults:
            raise InterruptError("stopped by hand")
        return word is Word.ASKED

    def _wait(self, member: Role, steps: Steps, interrupt: Fault | None = None) -> Program:
        began = self._world.now
        self._world.advanced = began
        try:
            return (yield from self.drive(steps, functools.partial(silent_at, member), interrupt=interrupt))
        except SilentServiceError:
            raise service_is_silent(member, self.host.clock) from None
        finally:
            now, stopped = self._world.now, self.host.stopped_until
            since = max(began, self._world.advanced, stopped, self._world.silent_until)
            self._overtime = max(self._overtime, now - since)
            self._overdue = max(self._overdue, now - max(began, stopped, member.deadline - self.host.ahead))
            self._waited = now - began

    def drive(
        self,
        steps: Steps,
        given_up: Callable[[float], float],
        answered: float | None = None,
        interrupt: Fault | None = None,
    ) -> Program:
        """Runs a machine; raises `SilentServiceError` if the service has not answered since the time `answered`.

        `given_up` returns how long that is tolerated, by the clock of this process.
        """

        def wait(resume: Callable[[Any], None]) -> None:
            ended, looked = False, self._world.now

            def end(result: Any) -> None:
                nonlocal ended
                if not ended:
                    ended = True
                    resume(result)

            def check() -> None:
                nonlocal looked
                if self._world.now - looked > _CHECK + STOPPED:  # as in `Board.last_answer`
                    task.answered = self._world.now
                looked = self._world.now
                if not ended and self.host.clock > given_up(task.answered + self.host.ahead):
                    end(SilentServiceError())
                elif not ended:
                    self.host.after(_CHECK, check)

            task = Task(self.host, steps, lambda result: self.host.after(0, lambda: end(result)))
            if answered is not None:
                task.answered = answered
            self._tasks.append(task)
            self.host.after(_CHECK, check)
            if interrupt is not None:
                self.host.after(interrupt.seconds / 4, lambda: end(InterruptError("stopped by hand")))

        return (yield wait)

    def _sleep(self, seconds: float) -> Callable[[Callable[[Any], None]], None]:
        return lambda resume: self.host.after(seconds, lambda: resume(None))

    def _begin_faults(self, faults: dict[str, Fault]) -> None:
        world, host = self._world, self.host
        if "crash" in faults:
            world.after(faults["crash"].seconds, self._crash)
        if "pause" in faults:
            world.after(world.random.uniform(0, 3), lambda: self._pause(faults["pause"].seconds))
        if "silence" in faults:
            world.after(world.random.uniform(0, 3), lambda: self._silence(faults["silence"].seconds))
        if "lost" in faults:
            host.lose_after = host.calls + 1 + int(faults["lost"].seconds) % 12
            host.loses_calls = int(10 * faults["lost"].seconds) % 2 == 1
        if "slow calls" in faults:
            host.slow_calls = min(faults["slow calls"].seconds, self._plan.stall) / 20

    def _crash(self) -> None:
        self.host.alive = False
        self._world.note(self.host, "dies")
        if self._number == LEADER:
            self._world.die(self._world.random.choice(["ends", "hang", "error"]))

    def _pause(self, seconds: float) -> None:
        self._world.note(self.host, f"is stopped for {seconds:.2f} s")
        self.host.stopped_until = self._world.now + seconds
        if self._number == LEADER:
            self._silence(seconds)

    def _silence(self, seconds: float) -> None:
        self._world.note("service", f"is silent for {seconds:.2f} s")
        self._world.silent_until = max(self._world.silent_until, self._world.now + seconds)


def report(session: str, process: int) -> str:
    """Returns the report of a process in a session."""
    return f"report of process {process} in session {session}"


def _attempt(restore: int) -> str:
    return f"restore {restore}"


def _after(seconds: float) -> Callable[[float], float]:
    return lambda answered: answered + seconds


def _call(action: Action) -> Steps:
    yield action
