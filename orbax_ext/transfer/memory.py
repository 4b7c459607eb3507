"""The memory of this process's devices, and how much of it a restore may have under way."""

from __future__ import annotations

import os

import jax

from orbax_ext.options import Options
from orbax_ext.plan.memory import AHEAD, group_bytes, limit

__all__ = ["AHEAD", "choose", "free_bytes", "group_bytes"]


def choose(options: Options, state_bytes: int, lane_batch_bytes: int = 0) -> int:
    """The limit in bytes per device, by what is free on this process's devices; see `plan.memory.limit`."""
    free = min(free_bytes(device) for device in jax.local_devices())
    return limit(options, state_bytes, lane_batch_bytes, free)


def free_bytes(device: jax.Device) -> int:
    """Free memory of a device; where the backend does not tell, its share of the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
