"""The memory of this process's devices, and how much of it a restore may have under way."""

from __future__ import annotations

import contextlib
import os
import pathlib

import jax

from orbax_ext.options import Options
from orbax_ext.plan.memory import limit
from orbax_ext.plan.planner import largest_lane_batch
from orbax_ext.request import Request

_CGROUP = pathlib.Path("/sys/fs/cgroup")


def memory_limit(options: Options, request: Request) -> int:
    """Returns the limit in bytes per device by what is free on this process's devices; see `plan.memory.limit`."""
    lane_batch_bytes = largest_lane_batch(request.leaves, request.mesh_infos)
    free = min(free_bytes(device) for device in jax.local_devices())
    return limit(options, request.device_bytes, lane_batch_bytes, free)


def host_memory_limit() -> int:
    """Returns how many bytes a restore may hold in host memory before it begins, if the user does not say.

    That is an eighth of what is available: as many as eight processes may be on this host.
    """
    return _available_bytes() // 8


def _available_bytes() -> int:
    """Returns the memory that this process can have, by the kernel and by the limit of its container (cgroup v2)."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number: there is no limit
        limit = int((_CGROUP / "memory.max").read_text())
        stats = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(stats.get("inactive_file", 0))
        available = min(available, max(0, limit - used))
    return available


def free_bytes(device: jax.Device) -> int:
    """Returns the free memory of a device; where the backend does not say, its share of the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return _available_bytes() // jax.local_device_count()
