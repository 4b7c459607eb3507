"""How much may be under way at a time on a device: read ahead, travelling, or arrived but not yet in its place."""

from __future__ import annotations

import os

import jax

from orbax_ext.options import Options

_MOST = 256 << 20  # more gains no bandwidth, and delays the first byte's departure
_LEAST = 64 << 20  # less costs more in meetings than it saves
_SHARE = 8  # of the state that may be under way

AHEAD = {
    "spread": 2,
    "single": 1,
}  # groups that are read beyond the next; what a reader holds of one is smaller in spread
_GROUPS = 4  # of the size that arrives: read ahead, travelling, being put in place


def choose(options: Options, state_bytes: int) -> int:
    """Bytes per device: what the user says, or an eighth of the state, if so much is free on this process's devices."""
    return limit(options, state_bytes, min(free_bytes(device) for device in jax.local_devices()))


def limit(options: Options, state_bytes: int, free: int) -> int:
    """The same for devices with so much free memory."""
    if options.broadcast_memory_limit_bytes is not None:
        return options.broadcast_memory_limit_bytes
    factor = options.broadcast_memory_scaling_factor or 0.75
    return max(1, min(_MOST, max(_LEAST, state_bytes // _SHARE), int(free * factor)))


def group_bytes(limit: int) -> int:
    """Bytes per device that one group may have, so that all groups under way keep to the limit."""
    return max(1, limit // _GROUPS)


def free_bytes(device: jax.Device) -> int:
    """Free memory of a device; where the backend does not tell, its share of the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
