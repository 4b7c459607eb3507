"""How much memory a step takes at its peak, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import pathlib
from collections.abc import Callable
from typing import Any


def peak_growth(step: Callable[[], Any]) -> int:
    """Runs `step` and returns by how many bytes this process's resident memory rose above what it was, at its peak."""
    gc.collect()
    _give_back()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
    before = _status("VmRSS")
    result = step()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _give_back() -> None:
    """Has the C library return the memory it keeps for later, which would hide that a step needs it."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}: memory can only be measured on Linux.")
