"""Work that one process does for all: the process that needs a result first computes it and publishes it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from absl import logging

from orbax_ext.meeting.board import Client
from orbax_ext.meeting.threads import watched

T = TypeVar("T")

_MAX_PART = 1 << 18  # characters of one value in the coordination service
_SERVICE_LIMIT = 30.0  # seconds for the service to set a value or to return one that is set
_LOOK_EVERY = 2.0  # seconds: the longest single wait for a result, after which the limit is checked


class SharedResults:
    """Results that the processes of a session share.

    No process depends on another one: if the process that does the work fails, dies or takes longer than `limit`
    seconds, the others do the work themselves.
    """

    def __init__(self, client: Client, home: str, process: int, limit: float) -> None:
        self._client = client
        self._home = home
        self._process = process
        self._limit = limit

    def once(self, name: str, work: Callable[[], str]) -> str:
        """Returns the result of `work`, which is done by the process that asked for `name` first."""
        place = f"{self._home}/{uuid.uuid5(uuid.NAMESPACE_URL, name).hex}"
        try:
            if _within(_SERVICE_LIMIT, lambda: self._is_first(place)):
                return self._work_for_all(place, work)
            result = _within(self._limit, lambda: self._result(place))
        except _WorkError as error:
            raise error.cause from None
        except Exception as error:
            logging.warning("orbax_ext: %s: this process does it for itself, because of %r", name, error)
            result = None
        return work() if result is None else result

    def _is_first(self, place: str) -> bool:
        try:
            self._client.key_value_set(f"{place}/by", str(self._process), allow_overwrite=False)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def _work_for_all(self, place: str, work: Callable[[], str]) -> str:
        parts: list[str] = []
        try:
            result = work()
            parts = [result[start : start + _MAX_PART] for start in range(0, len(result), _MAX_PART)] or [""]
        except BaseException as error:
            raise _WorkError(error) from None
        finally:
            _within(_SERVICE_LIMIT, lambda: self._publish(place, parts))
        return result

    def _publish(self, place: str, parts: list[str]) -> None:
        for number, part in enumerate(parts):
            self._client.key_value_set(f"{place}/{number}", part, allow_overwrite=True)
        self._client.key_value_set(f"{place}/parts", str(len(parts)), allow_overwrite=True)

    def _result(self, place: str) -> str | None:
        """Returns what the first process has published; None if its work failed."""
        deadline = time.monotonic() + self._limit
        while True:
            try:
                count = int(self._client.blocking_key_value_get(f"{place}/parts", int(_LOOK_EVERY * 1000)))
                break
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
                    raise
        wait = int(_SERVICE_LIMIT * 1000)
        parts = [self._client.blocking_key_value_get(f"{place}/{number}", wait) for number in range(count)]
        return "".join(parts) if parts else None


def _within(limit: float, function: Callable[[], T]) -> T:
    """Calls a function that uses the service, which may never answer; raises `GivenUpError` after `limit` seconds."""
    deadline = time.monotonic() + limit
    return watched(function, lambda: deadline)


class _WorkError(Exception):
    """The work itself failed on this process."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause
