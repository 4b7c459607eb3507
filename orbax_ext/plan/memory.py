"""How much may be under way at a time on a device: read, travelling, or arrived but not yet in its place. Pure."""

from __future__ import annotations

from orbax_ext.options import Options

_MOST = 256 << 20  # more gains no bandwidth, and delays the first byte's departure
_LEAST = 64 << 20  # less costs more in meetings than it saves
_SHARE = 8  # of the state that may be under way

# Groups that are read beyond the next; what a reader holds of one is smaller in spread.
AHEAD = {"spread": 2, "single": 1}
_GROUPS = 4  # of the size that arrives: read ahead, travelling, being put in place


def limit(options: Options, state_bytes: int, lane_batch_bytes: int, free: int) -> int:
    """Bytes per device: what the user says, or an eighth of the state, if so much is free.

    `lane_batch_bytes` is what leaves take that only travel together; rather more under way than these one at a time.
    """
    if options.broadcast_memory_limit_bytes is not None:
        return options.broadcast_memory_limit_bytes
    factor = options.broadcast_memory_scaling_factor or 0.75
    return max(1, min(_MOST, max(_LEAST, state_bytes // _SHARE, lane_batch_bytes * _GROUPS), int(free * factor)))


def group_bytes(limit: int) -> int:
    """Bytes per device that one group may have, so that all groups under way keep to the limit."""
    return max(1, limit // _GROUPS)
