"""The memory of this process's devices, and how much of it a restore may have under way."""

from __future__ import annotations

import os

import jax

from orbax_ext.options import Options
from orbax_ext.plan.memory import limit
from orbax_ext.plan.planner import largest_lane_batch
from orbax_ext.request import Request


def memory_limit(options: Options, request: Request) -> int:
    """Returns the limit in bytes per device by what is free on this process's devices; see `plan.memory.limit`."""
    lane_batch_bytes = largest_lane_batch(request.leaves, request.mesh_infos)
    free = min(free_bytes(device) for device in jax.local_devices())
    return limit(options, request.device_bytes, lane_batch_bytes, free)


def free_bytes(device: jax.Device) -> int:
    """Returns the free memory of a device; where the backend does not say, its share of the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
