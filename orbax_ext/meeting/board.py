"""The coordination service as a notice board: JSON values of bounded size, and when the service last answered.

Values from other processes are data: they are parsed as JSON, never executed, and never parsed if they are too long.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from orbax_ext.meeting.terms import MAX_VALUE

CLOSE_LIMIT = 1.0  # seconds for a write that is under way: what it writes later, nobody would remove
STOPPED = 1.0  # seconds: who waits looks several times a second, unless its process is stopped


class Client(Protocol):
    """The methods of JAX's coordination-service client that this package uses."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str) -> None: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class ClosedError(Exception):
    """The session is over. Stops a thread that nobody waits for any more but that still works for the session."""


class Board:
    """One session's access to the coordination service.

    `answered` is when the service last answered, by `time.monotonic()`.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answered = self._looked = time.monotonic()
        self._closed = False
        self._writing = threading.Lock()

    def close(self) -> None:
        """Makes every later read and write through this board raise `ClosedError`. Waits a moment for one under way."""
        self._closed = True
        if self._writing.acquire(timeout=CLOSE_LIMIT):
            self._writing.release()

    def last_answer(self) -> float:
        """Returns when the service last answered. Who waits for an answer looks here several times a second.

        If nobody looked for longer, this process was stopped and could hear no answer: the wait begins again.
        """
        now = time.monotonic()
        if now - self._looked > STOPPED:
            self.answered = now
        self._looked = now
        return self.answered

    def put(self, key: str, value: Mapping[str, Any], most: int = MAX_VALUE, *, once: bool = False) -> bool:
        """Sets a key; raises `ValueError` if the value is longer than `most` characters as JSON.

        With `once`, a key that is set stays as it is. Returns whether this value was set.
        """
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        if len(text) > most:
            raise ValueError(
                f"A message of {len(text)} characters is too long for a meeting: at most {most} are allowed."
            )
        try:
            with self._writing:
                self._open().key_value_set(key, text, allow_overwrite=not once)
        except Exception as error:
            if not once or "ALREADY_EXISTS" not in str(error):
                raise
            return False
        finally:
            self.answered = time.monotonic()
        return True

    def read(self, home: str, most: int = MAX_VALUE) -> dict[str, Any]:
        """Returns the values below `home` by the rest of their keys; None for one longer than `most` characters."""
        entries = self._open().key_value_dir_get(f"{home}/")
        self.answered = time.monotonic()
        start = len(home) + 1
        return {key[start:]: json.loads(value) if len(value) <= most else None for key, value in entries}

    def get(self, key: str) -> Any:
        """Returns the value of a key, or None if it is not set."""
        try:
            text = self._open().key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            text = "null"
        self.answered = time.monotonic()
        return json.loads(text)

    def wait(self, key: str, seconds: float, most: int) -> Any:
        """Returns the value of a key as soon as it is set, or None after `seconds`."""
        try:
            text = self._open().blocking_key_value_get(key, int(seconds * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None  # no sign that the service answers: the client itself measures the time
        self.answered = time.monotonic()
        if len(text) > most:
            raise ValueError(f"{key} has {len(text)} characters; expected at most {most}.")
        return json.loads(text)

    def count(self, key: str) -> int:
        """Adds one to a counter and returns its new value."""
        with self._writing:
            number = self._open().key_value_increment(key, 1)
        self.answered = time.monotonic()
        return int(number)

    def delete(self, key: str) -> None:
        """Removes a key and all keys under it."""
        with self._writing:
            self._open().key_value_delete(key)
        self.answered = time.monotonic()

    def _open(self) -> Client:
        if self._closed:
            raise ClosedError("this session is over")
        return self.client


class LocalClient:
    """The coordination service's client in a job of one process, which has no service."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if key in self._values and not allow_overwrite:
            raise KeyError(f"ALREADY_EXISTS: {key}")
        self._values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self._values:
            raise KeyError(f"NOT_FOUND: {key}")
        return self._values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self._values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        self._values = {name: value for name, value in self._values.items() if not f"{name}/".startswith(f"{key}/")}

    def key_value_increment(self, key: str, increment: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + increment)
        return int(self._values[key])

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        return self._values[key]
