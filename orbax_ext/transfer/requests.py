"""The limit on this process's requests to object stores, and what it follows: TensorStore's own counters."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import AsyncIterator

from orbax_ext.plan.requests import Answers, RequestLimit
from orbax_ext.storage import counters
from orbax_ext.transfer.rates import Stopwatch

_MOST = 512
_CONNECTIONS = 4  # a quarter of the files that the process may have open can be connections


class Requests:
    """Follows the reads of one process, of which several may run at a time."""

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()  # the event loops of two restores may be in two threads
        self._limit = RequestLimit(most)
        self._reading = Stopwatch()
        self._seen = self._counted()

    @property
    def limit(self) -> int:
        """The limit for reads that begin now."""
        return self._limit.current

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Enter it for as long as reads are under way."""
        with self._lock:
            self._reading.__enter__()
        try:
            yield
        finally:
            with self._lock:
                self._reading.__exit__()
                self._note()

    def _note(self) -> None:
        now, before = self._counted(), self._seen
        seen = Answers(
            now.requests - before.requests,
            now.refused - before.refused,
            now.bytes - before.bytes,
            now.seconds - before.seconds,
        )
        if self._limit.note(seen):
            self._seen = now

    def _counted(self) -> Answers:
        requests, refused = counters.http_responses()
        return Answers(requests, refused, counters.bytes_read(), self._reading.seconds)


def _most() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(1, min(_MOST, files // _CONNECTIONS))


REQUESTS = Requests(_most())
