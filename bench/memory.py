"""The peak memory of a step, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import pathlib
from collections.abc import Callable
from typing import Any


def peak_growth(step: Callable[[], Any]) -> int:
    """Runs `step` and returns by how many bytes this process's resident memory rose at its peak."""
    gc.collect()
    _return_freed_memory()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    result = step()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _return_freed_memory() -> None:
    """Gives memory that the C library keeps back to the system: a step that reuses it would seem to need none."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory can only be measured on Linux.")
