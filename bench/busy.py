"""Another program that keeps all cores busy: a loop for each core, at normal priority like the restore (not niced)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

# It ends by itself after its limit, and when the benchmark that started it is gone.
_LOOP = """
import os, sys, time
parent, end = os.getppid(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and os.getppid() == parent:
    for _ in range(200_000):
        pass
"""
_END_LIMIT = 5.0  # seconds for the system to end a loop that was killed


@contextlib.contextmanager
def all_cores(limit: float) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Keeps every core of the machine busy while the block runs, at most `limit` seconds."""
    command = [sys.executable, "-S", "-c", _LOOP, str(limit)]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait(_END_LIMIT)
