"""A coordination service in memory, for meetings of processes that are threads of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

from orbax_ext.meeting.board import LocalClient

T = TypeVar("T")


class SharedClient(LocalClient):
    """The client of every process of a test."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self._values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            super().key_value_set(key, value, allow_overwrite)
            self._changed.notify_all()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return super().key_value_dir_get(key)

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            super().key_value_delete(key)

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            return super().key_value_increment(key, increment)

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]


def on_processes(count: int, function: Callable[[int], T]) -> list[T | Exception]:
    """Calls a function with the index of each process, all at the same time; returns results and errors."""

    def outcome(process: int) -> T | Exception:
        try:
            return function(process)
        except Exception as error:
            return error

    with futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(outcome, range(count)))
