"""A world without real time: a coordination service, processes, a virtual clock and a scheduler with a seed.

The seed decides how long each call takes, and so who runs next. Calls behave as JAX's do: only a blocking get has a
time limit of its own, every other call waits as long as the service is silent, and a call that is under way takes
effect even if nobody waits for it any more.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from orbax_ext.meeting.actions import Action, Count, Delete, Log, Moment, Put, Sleep, Steps, Wait
from orbax_ext.meeting.board import Board, LocalClient
from orbax_ext.meeting.driver import perform

GONE = "UNAVAILABLE: failed to connect to all addresses"  # the error of a call to a service that has died
HEARTBEAT = 100.0  # seconds
_AT_ONCE = 0.2  # seconds until JAX's clients notice that the connection to the service has broken
_LATENCY = (0.0005, 0.02)  # seconds of one way of a message


class World:
    """The clock, the scheduler and the service."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.client = LocalClient()
        self.silent_until = 0.0
        self.dead: str | None = None  # what calls do once process 0 is dead: "hang", or "error", also if JAX "ends" all
        self.hosts: list[Host] = []
        self.advanced = 0.0  # when a process advanced last
        self.trace: list[str] | None = [] if tracing else None
        self._board = Board(self.client)
        self._waiting: dict[str, list[Call]] = {}
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls a function later. The order of functions at the same time is random."""
        heapq.heappush(self._events, (self.now + seconds, self.random.random(), next(self._numbers), function))

    def run(self, longest: float) -> bool:
        """Runs until nothing is left to do; returns False if that takes longer."""
        end = self.now + longest
        while self._events:
            moment, _, _, function = heapq.heappop(self._events)
            if moment > end:
                return False
            self.now = moment
            function()
        return True

    def latency(self) -> float:
        """Seconds of one way of a message; now and then a long one."""
        low, high = _LATENCY
        return self.random.uniform(low, high) * (20 if self.random.random() < 0.02 else 1)

    def die(self, how: str) -> None:
        """The service dies with process 0. JAX ends the others: at once, or after some time without a heartbeat."""
        self.dead = how

        def end_all() -> None:
            for host in self.hosts:
                host.alive = False

        self.after(_AT_ONCE if how == "ends" else HEARTBEAT, end_all)

    def note(self, who: object, what: Action | str) -> None:
        if self.trace is not None:  # only then the text of an action is made, which takes longer than the action
            self.trace.append(f"{self.now:9.3f}  {who}: {what if isinstance(what, str) else str(what)[:200]}")

    def take_effect(self, call: Call) -> None:
        """Does what a call asks for, when it reaches the service."""
        if self.dead == "hang":
            return
        if self.dead is not None:
            call.reply(RuntimeError(GONE))
        elif self.now < self.silent_until:
            self.after(self.silent_until - self.now + self.latency(), lambda: self.take_effect(call))
        elif isinstance(call.action, Wait) and call.action.key not in self.client._values:
            self._waiting.setdefault(call.action.key, []).append(call)
        else:
            try:
                answer = perform(call.action, self._board)
            except Exception as error:
                answer = error
            call.reply(answer)
            self._wake(getattr(call.action, "key", ""))

    def _wake(self, key: str) -> None:
        if key in self._waiting and key in self.client._values:
            for call in self._waiting.pop(key):
                self.take_effect(call)


class Host:
    """What a process runs on: it may be stopped and continue, or die, and its clock may be wrong."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.stopped_until = 0.0
        self.lose_after = -1  # the answer to this one of its calls is lost; -1 for none
        self.loses_calls = False  # the call itself is lost, not only the answer
        self.slow_calls = 0.0  # seconds that each of its calls takes longer
        self.calls = 0
        self.ahead = world.random.uniform(0, 1000)  # seconds that its clock is ahead of the world's
        self._wall = world.random.uniform(-30, 30)
        world.hosts.append(self)

    def __str__(self) -> str:
        return f"process {self.number}"

    @property
    def clock(self) -> float:
        """This process's own clock."""
        return self.ahead + self.world.now

    def moment(self, answer: Any) -> Moment:
        return Moment(answer, self.clock, self.world.now + self._wall)

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls a function later: not while the process is stopped, and not if it is dead by then."""
        self.world.after(seconds, lambda: self._when_awake(function))

    def _when_awake(self, function: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.world.now < self.stopped_until:
            self.after(self.stopped_until - self.world.now + self.world.random.uniform(0, 0.01), function)
        else:
            function()


class Call:
    """One call to the service."""

    def __init__(self, task: Task, action: Action) -> None:
        self.task = task
        self.action = action
        self._answered = False
        host, world = task.host, task.host.world
        host.calls += 1
        self._lost = host.calls == host.lose_after
        if not (self._lost and host.loses_calls):
            world.after(world.latency() + host.slow_calls, lambda: world.take_effect(self))
        if isinstance(action, Wait):  # the client itself measures the time, also if the service is silent
            host.after(action.seconds, lambda: self._deliver(None, by_service=False))

    def reply(self, answer: Any) -> None:
        host, world = self.task.host, self.task.host.world
        if not self._lost:
            host.after(world.latency(), lambda: self._deliver(answer, by_service=True))

    def _deliver(self, answer: Any, by_service: bool) -> None:
        if not self._answered:
            self._answered = True
            self.task.resume(answer, by_service)


class Task:
    """A machine that runs on a host. `done` is called with its result or its error."""

    def __init__(self, host: Host, steps: Steps, done: Callable[[Any], None]) -> None:
        self.host = host
        self.answered = host.world.now  # when the service answered last
        self.abandoned = False
        self.running = True
        self.writing = False  # a call that changes something is under way
        self._steps = steps
        self._done = done
        self._advance(lambda: next(steps))

    def resume(self, answer: Any, by_service: bool = False) -> None:
        self.writing = False
        if by_service:
            self.answered = self.host.world.now
        if self.abandoned:  # its session is closed: the next call would be refused
            self.running = False
        elif isinstance(answer, Exception):
            self._advance(lambda: self._steps.throw(answer))
        else:
            self._advance(lambda: self._steps.send(self.host.moment(answer)))

    def _advance(self, step: Callable[[], Action]) -> None:
        try:
            action = step()
        except StopIteration as end:
            self._end(end.value)
            return
        except Exception as error:
            self._end(error)
            return
        self.host.world.note(self.host, action)
        if isinstance(action, Sleep):
            self.host.after(action.seconds, lambda: self.resume(None))
        elif isinstance(action, Log):
            self.host.after(0, lambda: self.resume(None))
        else:
            self.writing = isinstance(action, Put | Count | Delete)
            Call(self, action)

    def _end(self, result: Any) -> None:
        self.running = False
        if not self.abandoned:
            self._done(result)
