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

Keys: `orbax_ext/<subject>/in|reply|absent|status/...` until all have arrived, then `orbax_ext/session/<id>/...`. What
is found there is data: JSON of bounded size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import jax
from absl import logging

from orbax_ext import compat, errors
from orbax_ext.waiting import GivenUpError, Ticker, in_thread, watched

_LEADER = 0
_PREFIX = "orbax_ext"
_PAUSES = (0.002, 0.25)  # first and longest pause of the gathering process between two looks
_LOG_EVERY = 30.0
_GRACE = 3.0  # the others wait this much longer than process 0, whose verdict names the missing
_SILENCE = 5.0  # and this much longer again for a service that does not answer
_LEAVE_LIMIT = 5.0
_MAX_VALUE = 1 << 16  # characters of one process's contribution
_MAX_NAMES = 16  # processes that a message names

T = TypeVar("T")
Payload = Mapping[str, Any]  # must survive JSON


class Client(Protocol):
    """The part of JAX's coordination-service client that meetings use."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


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
    """

    def __init__(
        self,
        client: Client,
        process: int,
        processes: int,
        subject: str,
        limits: Limits,
        done: Callable[[], int] = lambda: 0,
    ) -> None:
        self._client = client
        self._process = process
        self._processes = processes
        self._subject = f"{_PREFIX}/{subject}"
        self._limits = limits
        self._done = done
        self._started = self._answered = time.monotonic()
        self._nonce = uuid.uuid4().hex
        self._meetings = 0
        self._phase = "arrive"
        self._heard: dict[int, Heard] = {}
        # With many processes each looks less often, so that the service is asked no more in all.
        self._look_every = min(10.0, max(2.0, processes / 100))
        self.id = ""
        self.hosts: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.leave("" if error is None else f"{type(error).__name__}: {error}")

    def arrive(self, mine: Payload) -> dict[int, Payload]:
        """Waits until all processes have arrived with the same subject; returns what each brought."""
        return self._watched(functools.partial(self._arrive, {**mine, "host": socket.gethostname()}))

    def meet(self, phase: str, mine: Payload | None = None) -> dict[int, Payload]:
        """Waits until all processes are at this meeting; returns what each brought.

        Every process must hold the same meetings in the same order. `phase` names it in messages.
        """
        self._phase = phase
        return self._watched(functools.partial(self._meet, dict(mine or {})))

    async def together(self, phase: str, work: Awaitable[T]) -> T:
        """Does a piece of work and meets: returns its result if it succeeded on all processes.

        Otherwise raises the same `RestoreFailedError` on all of them.
        """
        self._phase = phase
        mine: Payload = {}
        try:
            with Ticker(self._tell_progress, every=max(1.0, self._processes / 200)):
                result = await work
        except Exception as error:
            mine = errors.to_payload(error)
        except BaseException as error:  # interrupted: tell the others, but do not stay for the meeting
            self._set(f"{self._home}/in/{self._meetings + 1}/{self._process}", errors.to_payload(error))
            raise
        outcomes = await in_thread(self.meet, phase, mine)
        failed = errors.failures(outcomes, self.hosts, phase)
        if failed:
            raise errors.restore_failed(failed)
        return result

    async def barrier(self, name: str) -> None:
        """Orbax's barrier on the coordination service, entered by all processes a moment after a meeting."""
        wait = functools.partial(
            compat.sync_global_processes,
            f"{_PREFIX}.{self.id}.{name}",
            timeout=math.ceil(self._limits.stall),
            processes=set(range(self._processes)),
        )
        try:
            await in_thread(wait, limit=self._limits.stall + _GRACE)
        except TimeoutError:
            raise self._silent_service() from None

    def leave(self, why: str = "") -> None:
        """Tells the others that this process is gone; the last one removes the session's keys. Never raises."""
        if not self.id:
            return

        def go() -> None:
            self._set(f"{self._home}/left/{self._process}", {"why": why[: errors.MAX_ERROR]})
            if len(self._read(f"{self._home}/left")) == self._processes:
                self._delete(self._home)

        try:
            watched(go, lambda: self._answered + _LEAVE_LIMIT)
        except Exception as error:
            logging.warning("orbax_ext: could not tidy up after a meeting: %s", error)

    # Arriving and meeting, as seen by both sides.

    def _arrive(self, mine: Payload) -> dict[int, Payload]:
        home = f"{self._subject}/in"
        reply = f"{self._subject}/reply/{self._process}.{self._nonce}"
        if self._process == _LEADER:
            self._delete(f"{self._subject}/reply")  # of sessions that came to nothing
        self._set(f"{home}/{self._process}", {"nonce": self._nonce, "payload": mine})
        try:
            if self._process == _LEADER:
                self._call_together(home)
            else:
                self.id = self._await(reply, f"{self._subject}/status", home)["id"]
        finally:
            if not self.id:  # gave up: nobody may count on this process any more
                self._delete(f"{home}/{self._process}")
            self._delete(reply)
        summary = self._await(f"{self._home}/out/0", f"{self._home}/status", home)
        found = {int(process): payload for process, payload in summary.items()}
        self.hosts = {process: str(payload["host"]) for process, payload in found.items()}
        return found

    def _meet(self, mine: Payload) -> dict[int, Payload]:
        self._meetings += 1
        home, out = f"{self._home}/in/{self._meetings}", f"{self._home}/out/{self._meetings}"
        self._set(f"{home}/{self._process}", mine)
        if self._process == _LEADER:
            try:
                found = self._gather(home)
            except (errors.RestoreFailedError, errors.RestoreTimeoutError) as error:
                self._set(out, {"verdict": errors.to_verdict(error)})
                raise
            self._delete(home)
            self._delete(f"{self._home}/out/{self._meetings - 1}")  # all are here, so all have read it
            self._set(out, {str(process): payload for process, payload in found.items()})
            return found
        summary = self._await(out, f"{self._home}/status", home)
        return {int(process): payload for process, payload in summary.items()}

    # Process 0's side.

    def _call_together(self, home: str) -> None:
        """Gathers the arrivals and gives each a reply: the session's id, or who is missing."""
        try:
            arrivals = self._gather(home)
        except (errors.RestoreFailedError, errors.RestoreTimeoutError) as error:
            for process, arrival in self._read(home).items():
                self._set(f"{self._subject}/reply/{process}.{arrival['nonce']}", {"verdict": errors.to_verdict(error)})
            raise
        finally:
            self._delete(f"{self._subject}/status")
        self.id = uuid.uuid4().hex
        self._delete(home)
        self._set(f"{self._home}/out/0", {str(process): arrival["payload"] for process, arrival in arrivals.items()})
        for process, arrival in arrivals.items():
            self._set(f"{self._subject}/reply/{process}.{arrival['nonce']}", {"id": self.id})

    def _gather(self, home: str) -> dict[int, Any]:
        """Waits for every process's contribution under `home`, telling the others how it goes."""
        clock = _Clock(self._limits, self._started)
        pause, longest = _PAUSES
        looked = time.monotonic()
        while True:
            found = self._read(home)
            missing = [process for process in range(self._processes) if process not in found]
            if not missing:
                return found
            if time.monotonic() - looked > self._look_every:
                looked = time.monotonic()
                self._raise_if_gone()
                advance = self._listen()
                clock.note((len(found), advance))
                self._set(f"{self._status_home}/status", {"advance": advance, "missing": missing[:_MAX_NAMES]})
                clock.log_waiting(self._phase, self._names(missing))
            if clock.expired():
                raise self._timeout(missing, {process: str(news) for process, news in self._heard.items()})
            time.sleep(pause)
            pause = min(longest, pause * 1.5)

    def _listen(self) -> int:
        """Reads the processes' progress; the result grows as long as anybody advances."""
        if self.id:
            for process, report in self._read(f"{self._home}/progress").items():
                before = self._heard.get(process)
                if before is None or (before.phase, before.done) != (report["phase"], report["done"]):
                    self._heard[process] = Heard(report["phase"], report["done"], time.monotonic())
        return sum(news.done for news in self._heard.values()) + len(self._heard)

    # The others' side.

    def _await(self, key: str, status: str, home: str) -> Any:
        """Waits for process 0 to set `key`; `home` is where the contributions to this meeting are."""
        clock = _Clock(self._limits, self._started, grace=_GRACE)
        while True:
            try:
                text = self._client.blocking_key_value_get(key, int(self._look_every * 1000))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            else:
                self._answered = time.monotonic()
                found = json.loads(text)
                if "verdict" in found:
                    raise errors.from_verdict(found["verdict"])
                return found
            report = self._get(status)
            self._raise_if_gone()
            if report is not None:
                clock.note((report["advance"], report["missing"]))
                clock.log_waiting(self._phase, self._names(report["missing"]))
            if clock.expired():
                here = self._read(home)
                raise self._timeout([p for p in range(self._processes) if p not in here] or [_LEADER], {})

    # Both sides.

    def _tell_progress(self) -> None:
        self._set(f"{self._home}/progress/{self._process}", {"phase": self._phase, "done": self._done()})

    def _raise_if_gone(self) -> None:
        """Raises if a process has left the session, or will not come to it."""
        gone = self._read(f"{self._home}/left" if self.id else f"{self._subject}/absent")
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
        self._answered = time.monotonic()
        limit = self._limits.stall + _GRACE + _SILENCE
        try:
            return watched(function, lambda: self._answered + limit)
        except GivenUpError:
            raise self._silent_service() from None

    def _silent_service(self) -> errors.RestoreTimeoutError:
        return self._timeout([_LEADER], {_LEADER: "the coordination service, which runs there, does not answer"})

    def _timeout(self, missing: Collection[int], heard: Mapping[Any, str]) -> errors.RestoreTimeoutError:
        phases = {int(process): text for process, text in heard.items() if int(process) in missing}
        lines = [f"process {self._names([process])}: {phases.get(process, 'nothing heard')}" for process in missing]
        waited = time.monotonic() - self._started
        return errors.RestoreTimeoutError(
            f"gave up in phase {self._phase!r} after {waited:.0f} s ({self._limits}); missing:\n  "
            + "\n  ".join(lines),
            missing,
            phases,
        )

    def _names(self, processes: Collection[int]) -> str:
        shown = [f"{p} ({self.hosts[p]})" if p in self.hosts else str(p) for p in list(processes)[:_MAX_NAMES]]
        return ", ".join(shown) + (" and more" if len(processes) > len(shown) else "")

    def _host(self, process: int) -> str:
        return self.hosts.get(process, "unknown host")

    @property
    def _home(self) -> str:
        return f"{_PREFIX}/session/{self.id}"

    @property
    def _status_home(self) -> str:
        return self._home if self.id else self._subject

    # The service, with JSON values.

    def _set(self, key: str, value: Payload) -> None:
        text = json.dumps(value, separators=(",", ":"))
        if len(text) > _MAX_VALUE * self._processes:
            raise ValueError(f"A message of {len(text)} characters is too long for a meeting.")
        self._client.key_value_set(key, text, allow_overwrite=True)
        self._answered = time.monotonic()

    def _read(self, home: str) -> dict[int, Any]:
        """What each process has put under `home`."""
        entries = self._client.key_value_dir_get(f"{home}/")
        self._answered = time.monotonic()
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries if len(value) <= _MAX_VALUE}

    def _get(self, key: str) -> Any:
        try:
            text = self._client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            text = "null"
        self._answered = time.monotonic()
        return json.loads(text)

    def _delete(self, key: str) -> None:
        self._client.key_value_delete(key)
        self._answered = time.monotonic()


def open_session(subject: str, limits: Limits, done: Callable[[], int] = lambda: 0) -> Session:
    """A session of all processes of this job."""
    client = compat.coordination_client() if jax.process_count() > 1 else compat.LonelyClient()
    return Session(client, jax.process_index(), jax.process_count(), subject, limits, done)


def gather(subject: str, mine: Payload, limits: Limits) -> dict[int, Payload]:
    """One meeting of all processes of this job: waits for all, returns what each brought."""
    with open_session(subject, limits) as session:
        return session.arrive(mine)


class _Clock:
    """Tells when waiting has lasted long enough, and when to log that one waits."""

    def __init__(self, limits: Limits, started: float, grace: float = 0.0) -> None:
        self._limits = limits
        self._started = started
        self._grace = grace
        self._advanced = self._logged = time.monotonic()
        self._seen: object = None

    def note(self, state: object) -> None:
        if state != self._seen:
            if self._seen is not None:
                self._advanced = time.monotonic()
            self._seen = state

    def expired(self) -> bool:
        now, total = time.monotonic(), self._limits.total
        return now - self._advanced > self._limits.stall + self._grace or (
            total is not None and now - self._started > total + self._grace
        )

    def log_waiting(self, phase: str, missing: str) -> None:
        if time.monotonic() - self._logged > _LOG_EVERY:
            self._logged = time.monotonic()
            logging.info("orbax_ext: %s: waiting for process %s", phase, missing)
