"""Meetings of all processes on JAX's coordination service: who is here, what each has to say, who is missing.

A meeting is never a collective: it works while devices are busy, it has time limits, and it can say who is missing.
Process 0 gathers and publishes one summary, so the cost is a few messages per process however many there are.

How processes that may have called restore a different number of times find each other: each one announces itself
under `in/<process>` with a nonce, and waits for a reply addressed to that nonce. Process 0 replies once all have
announced themselves, with a new id under which the later meetings of this session are held. No counter has to
agree, and nothing that an earlier, failed session left behind can be taken for a reply.

Waiting is bounded by progress: processes publish how far they are, and waiting ends when nobody has advanced for
`stall` seconds, or after `total` seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import socket
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import jax
from absl import logging

from orbax_ext import compat, errors
from orbax_ext.waiting import in_thread

_LEADER = 0
_PREFIX = "orbax_ext"
_SLICE = 2.0  # seconds of one blocking look for the summary, after which the status is looked at
_LEADER_POLL = (0.002, 0.25)  # first and longest pause of the gathering process
_STATUS_EVERY = 2.0
_LOG_EVERY = 30.0
_LEADER_GRACE = 5.0  # the others wait this much longer than process 0, whose verdict names the missing
_MAX_VALUE = 1 << 16  # characters of one process's contribution; longer ones are refused

_MAX_ERROR = 4096
_MAX_TRACEBACK = 16384

T = TypeVar("T")
Payload = Mapping[str, Any]  # must survive JSON


class Client(Protocol):
    """The part of JAX's coordination-service client that meetings use."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str) -> None: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait: `stall` seconds without anybody's progress, `total` seconds in all."""

    stall: float = 300.0
    total: float | None = None


class Session:
    """The meetings of one restore. `arrive` first, then `meet` as often as needed, `close` at the end."""

    def __init__(self, client: Client, process: int, processes: int, subject: str, limits: Limits) -> None:
        self._client = client
        self._process = process
        self._processes = processes
        self._subject = f"{_PREFIX}/{subject}"
        self._limits = limits
        self._started = time.monotonic()
        self._nonce = uuid.uuid4().hex
        self._meetings = 0
        self._phase = "arrive"
        self._done = 0
        self.id = ""
        self.hosts: dict[int, str] = {}

    def arrive(self, mine: Payload) -> dict[int, Payload]:
        """Waits until all processes have arrived with the same subject; returns what each brought."""
        home = f"{self._subject}/in"
        mine = {**mine, "host": socket.gethostname()}
        self._set(f"{home}/{self._process}", {"nonce": self._nonce, "payload": mine})
        try:
            if self._process == _LEADER:
                arrivals = self._gather(home, lambda missing: self._turn_away(home, missing))
                self.id = uuid.uuid4().hex
                self._delete(home)
                self._delete(f"{self._subject}/status")
                payloads = {process: arrival["payload"] for process, arrival in arrivals.items()}
                self._set(f"{self._home}/out/0", {str(process): payload for process, payload in payloads.items()})
                for process, arrival in arrivals.items():
                    self._set(f"{self._subject}/reply/{process}.{arrival['nonce']}", {"id": self.id})
            else:
                reply = f"{self._subject}/reply/{self._process}.{self._nonce}"
                answer = self._await(reply, f"{self._subject}/status", lambda: self._absent("arrive", home))
                if "missing" in answer:
                    raise self._timeout("arrive", answer["missing"])
                self.id = answer["id"]
        finally:
            if not self.id:  # gave up: nobody may count on this process any more
                self._delete(f"{home}/{self._process}")
            self._delete(f"{self._subject}/reply/{self._process}.{self._nonce}")
        summary = self._await(f"{self._home}/out/0", None, lambda: self._absent("arrive", home))
        found = {int(process): payload for process, payload in summary.items()}
        self.hosts = {process: str(payload["host"]) for process, payload in found.items()}
        return found

    def meet(self, phase: str, mine: Payload | None = None) -> dict[int, Payload]:
        """Waits until all processes are at this meeting; returns what each brought.

        Every process must hold the same meetings in the same order. `phase` names it in messages.
        """
        self._meetings += 1
        self._phase = phase
        home = f"{self._home}/in/{self._meetings}"
        out = f"{self._home}/out/{self._meetings}"
        self._set(f"{home}/{self._process}", dict(mine or {}))
        if self._process == _LEADER:
            gathered = self._gather(home, lambda missing: self._publish_timeout(out, phase, missing))
            self._delete(home)
            self._delete(f"{self._home}/out/{self._meetings - 1}")  # all are here, so all have read it
            self._set(out, {str(process): payload for process, payload in gathered.items()})
            return gathered
        summary = self._await(out, f"{self._home}/status", lambda: self._absent(phase, home))
        if "missing" in summary:
            raise self._timeout(phase, summary["missing"], summary.get("phases", {}))
        return {int(process): payload for process, payload in summary.items()}

    async def together(self, phase: str, work: Awaitable[T]) -> T:
        """Does a piece of work and meets: returns its result if it succeeded on all processes.

        Otherwise raises the same `RestoreFailedError` on all of them.
        """
        self._phase = phase
        result: T | None = None
        mine: Payload = {}
        try:
            result = await work
        except Exception as error:
            mine = _failure(error)
        except BaseException as error:  # interrupted: tell the others, but do not stay for the meeting
            self._set(f"{self._home}/in/{self._meetings + 1}/{self._process}", _failure(error))
            raise
        outcomes = await in_thread(self.meet, phase, mine)
        failed = {
            process: errors.ProcessFailure(
                self.hosts[process], phase, outcome["error"], outcome["traceback"], outcome["kind"]
            )
            for process, outcome in outcomes.items()
            if "error" in outcome
        }
        if failed:
            raise errors.restore_failed(failed)
        return result  # type: ignore[return-value]

    async def barrier(self, name: str) -> None:
        """Orbax's barrier on the coordination service, entered by all processes a moment after a meeting."""
        await in_thread(
            functools.partial(
                compat.sync_global_processes,
                f"orbax_ext.{self.id}.{name}",
                timeout=math.ceil(self._limits.stall),
                processes=set(range(self._processes)),
            )
        )

    def progress(self, phase: str, done: int) -> None:
        """Tells the others that this process is alive and how far it is. Cheap; call it every second or so."""
        self._phase, self._done = phase, done
        self._set(f"{self._home}/progress/{self._process}", {"phase": phase, "done": done})

    def close(self) -> None:
        """Removes the session's keys once every process has left it. Never raises."""
        if not self.id:
            return
        try:
            left = self._client.key_value_increment(f"{self._home}/left", 1)
            if left == self._processes:  # the last one puts the chairs up
                self._delete(self._home)
        except Exception as error:
            logging.warning("orbax_ext: could not tidy up after a meeting: %s", error)

    @property
    def _home(self) -> str:
        return f"{_PREFIX}/session/{self.id}"

    # What process 0 does.

    def _gather(self, home: str, timed_out: Callable[[Collection[int]], errors.RestoreTimeoutError]) -> dict[int, Any]:
        """Waits for every process's contribution under `home`, telling the others how it goes."""
        clock = _Clock(self._limits, self._started)
        pause, longest = _LEADER_POLL
        last_status = time.monotonic()
        while True:
            found = self._read(home)
            missing = [process for process in range(self._processes) if process not in found]
            if not missing:
                return found
            now = time.monotonic()
            if now - last_status > _STATUS_EVERY:
                last_status = now
                clock.note((len(found), self._advance()))
                self._publish_status(missing)
                clock.log_waiting(self._phase, self._name(missing))
            if clock.expired():
                raise timed_out(missing)
            time.sleep(pause)
            pause = min(longest, pause * 1.5)

    def _advance(self) -> int:
        """A number that grows as long as anybody advances."""
        if not self.id:
            return 0
        return sum(int(report.get("done", 0)) for report in self._read(f"{self._home}/progress").values())

    def _publish_status(self, missing: Collection[int]) -> None:
        home = self._home if self.id else self._subject
        self._set(f"{home}/status", {"advance": self._advance(), "missing": list(missing), "at": time.time()})

    def _turn_away(self, home: str, missing: Collection[int]) -> errors.RestoreTimeoutError:
        """Tells those who did arrive that the session will not be held."""
        for process, arrival in self._read(home).items():
            self._set(f"{self._subject}/reply/{process}.{arrival['nonce']}", {"missing": list(missing)})
        self._delete(f"{self._subject}/status")
        return self._timeout("arrive", missing)

    def _publish_timeout(self, out: str, phase: str, missing: Collection[int]) -> errors.RestoreTimeoutError:
        phases = {str(process): self._last_heard(process) for process in missing}
        self._set(out, {"missing": list(missing), "phases": phases})
        return self._timeout(phase, missing, phases)

    def _last_heard(self, process: int) -> str:
        report = self._read(f"{self._home}/progress").get(process) if self.id else None
        return f"{report['phase']}, {report['done']} bytes done" if report else "nothing heard"

    # What the others do.

    def _await(self, key: str, status: str | None, give_up: Callable[[], errors.RestoreTimeoutError]) -> Any:
        clock = _Clock(self._limits, self._started, grace=_LEADER_GRACE)
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(_SLICE * 1000)))
            except Exception as error:
                if not _is_deadline(error):
                    raise
            report = self._get(status) if status else None
            if report is not None:
                clock.note((report["advance"], len(report["missing"])))
                clock.log_waiting(self._phase, self._name(report["missing"]))
            if clock.expired():
                raise give_up()

    def _absent(self, phase: str, home: str) -> errors.RestoreTimeoutError:
        found = self._read(home)
        return self._timeout(
            phase, [process for process in range(self._processes) if process not in found] or [_LEADER]
        )

    def _timeout(
        self, phase: str, missing: Collection[int], phases: Mapping[str, str] | None = None
    ) -> errors.RestoreTimeoutError:
        heard = {int(process): text for process, text in (phases or {}).items()}
        waited = time.monotonic() - self._started
        lines = [f"process {self._name([process])} ({heard.get(process, 'nothing heard')})" for process in missing]
        limits = f"stall_timeout={self._limits.stall:g}" + (
            f", timeout={self._limits.total:g}" if self._limits.total is not None else ""
        )
        message = f"gave up at the meeting {phase!r} after {waited:.0f} s ({limits}); still missing:\n  " + "\n  ".join(
            lines
        )
        return errors.RestoreTimeoutError(message, missing, heard)

    def _name(self, processes: Collection[int]) -> str:
        shown = [
            f"{process} ({self.hosts[process]})" if process in self.hosts else str(process) for process in processes
        ]
        return ", ".join(shown[:16]) + (f" and {len(shown) - 16} more" if len(shown) > 16 else "")

    # The service, with JSON values.

    def _set(self, key: str, value: Payload) -> None:
        text = json.dumps(value, separators=(",", ":"))
        if len(text) > _MAX_VALUE * max(1, self._processes):
            raise ValueError(f"A message of {len(text)} characters is too long for a meeting.")
        self._client.key_value_set(key, text, allow_overwrite=True)

    def _read(self, home: str) -> dict[int, Any]:
        """What each process has put under `home`."""
        entries = self._client.key_value_dir_get(home + "/")
        return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in entries if len(value) <= _MAX_VALUE}

    def _get(self, key: str) -> Any:
        home, _, name = key.rpartition("/")
        for found, value in self._client.key_value_dir_get(home + "/"):
            if found.rsplit("/", 1)[1] == name and found == key:
                return json.loads(value)
        return None

    def _delete(self, key: str) -> None:
        self._client.key_value_delete(key)


def open_session(subject: str, limits: Limits) -> Session:
    """A session of all processes of this job."""
    client = compat.coordination_client() if jax.process_count() > 1 else _Alone()
    return Session(client, jax.process_index(), jax.process_count(), subject, limits)


def check_agreement(wanted: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> None:
    """Raises `PlanMismatchError`, the same on all processes, unless all want the same."""
    differing = [name for name in wanted[_LEADER] if len({each.get(name) for each in wanted.values()}) > 1]
    if not differing:
        return
    lines = []
    for name in differing:
        usual = collections.Counter(each.get(name) for each in wanted.values()).most_common(1)[0][0]
        odd = [process for process, each in wanted.items() if each.get(name) != usual]
        shown = ", ".join(
            f"process {process} ({hosts[process]}) has {wanted[process].get(name)}" for process in odd[:8]
        )
        lines.append(f"{name}: most have {usual}, but {shown}" + (" and others" if len(odd) > 8 else ""))
    raise errors.PlanMismatchError(
        "the processes do not agree on what to restore:\n  " + "\n  ".join(lines),
        {process: ";".join(f"{name}={each.get(name)}" for name in each) for process, each in wanted.items()},
    )


def _failure(error: BaseException) -> Payload:
    """An error as text. Cut to size: it goes to every process."""
    text = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return {"error": text[:_MAX_ERROR], "traceback": trace[-_MAX_TRACEBACK:], "kind": errors.builtin_kind(error)}


class _Alone:
    """Stands in for the coordination service in a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self._values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        self._values = {name: value for name, value in self._values.items() if not f"{name}/".startswith(f"{key}/")}

    def key_value_increment(self, key: str, increment: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + increment)
        return int(self._values[key])

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        return self._values[key]


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
            self._seen = state
            self._advanced = time.monotonic()

    def expired(self) -> bool:
        now = time.monotonic()
        total = self._limits.total
        return now - self._advanced > self._limits.stall + self._grace or (
            total is not None and now - self._started > total + self._grace
        )

    def log_waiting(self, phase: str, missing: str) -> None:
        if time.monotonic() - self._logged > _LOG_EVERY:
            self._logged = time.monotonic()
            logging.info("orbax_ext: %s: waiting for process %s", phase, missing)


def _is_deadline(error: Exception) -> bool:
    return "DEADLINE_EXCEEDED" in str(error) or "timed out" in str(error).lower()
