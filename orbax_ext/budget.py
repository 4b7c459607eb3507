"""How much memory one exchange may take on a device."""

from __future__ import annotations

import os

import jax

from orbax_ext.options import Options

_DEFAULT_MOST = 256 << 20  # larger groups gain no bandwidth, and delay the first byte's departure
_COPIES = 3  # what is read next, what travels, what arrives


def choose(options: Options) -> int:
    """Bytes per device: what the user says, or a share of what is free on this process's devices."""
    if options.broadcast_memory_limit_bytes is not None:
        return options.broadcast_memory_limit_bytes
    factor = options.broadcast_memory_scaling_factor or 0.75
    free = min(free_bytes(device) for device in jax.local_devices())
    return max(1, min(_DEFAULT_MOST, int(free * factor / _COPIES)))


def free_bytes(device: jax.Device) -> int:
    """Free memory of a device; where the backend does not tell, its share of the host's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
