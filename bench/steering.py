"""Changes the storage links of hosts while they restore."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures

from bench.changes import Change
from bench.network import Network

_PAUSE = 0.05  # seconds between two looks at the links' counters: 2 MB on a link of 320 Mbit/s


@contextlib.contextmanager
def changing(net: Network, changes: Sequence[Change], started: pathlib.Path) -> Iterator[None]:
    """Makes the changes while the block runs, from when the file `started` is there, and undoes them in the end."""
    now = [change for change in changes if change.from_the_start]
    later = [change for change in changes if not change.from_the_start]
    stop = threading.Event()
    try:
        _change(net, now)
        with futures.ThreadPoolExecutor(1) as thread:
            steered = thread.submit(_steer, net, later, started, stop)
            try:
                yield
            finally:
                stop.set()
        steered.result()
    finally:
        touched = sorted({host for change in changes for host in change.hosts(net.hosts)})
        _change(net, [Change(net.links.to_storage, host) for host in touched])


def _steer(net: Network, pending: list[Change], started: pathlib.Path, stop: threading.Event) -> None:
    while pending and not started.exists():
        if stop.wait(_PAUSE):
            return
    begun, counts = time.monotonic(), any(change.bytes for change in pending)
    before = net.bytes_passed() if counts else [0] * net.hosts
    while pending:
        passed = net.bytes_passed() if counts else before
        since = [now - then for now, then in zip(passed, before, strict=True)]
        due = [change for change in pending if change.is_due(time.monotonic() - begun, since)]
        pending = [change for change in pending if change not in due]
        _change(net, due)
        if stop.wait(_PAUSE):
            return


def _change(net: Network, changes: Sequence[Change]) -> None:
    for change in changes:
        for host in change.hosts(net.hosts):
            net.set_storage_rate(host, change.rate)
