"""The memory limit: bytes per device that may be under way, read or travelling or arrived but not yet in place."""

from __future__ import annotations

from orbax_ext.options import Options, Strategy

_MOST = 256 << 20  # more gains no bandwidth, and delays the first exchange
_LEAST = 64 << 20  # less costs more in meetings than it saves
_SHARE = 8  # an eighth of the state may be under way

# Groups that are read beyond the next one. In spread, a process reads less of each group, and it goes on while it waits
# for others that are late (`ahead_bytes`).
AHEAD = {"spread": 2, "single": 1}

# Groups that are under way at a time: read ahead, travelling, being put in place. In auto two more are read directly.
# In single a process has read two whole groups ahead, and a sum takes three times its size: XLA's CPU backend converts
# the operand to integers, adds, and converts back.
_GROUPS: dict[Strategy, int] = {"auto": 6, "spread": 4, "single": 5, "direct": 4}


def limit(options: Options, state_bytes: int, lane_batch_bytes: int, free: int) -> int:
    """Returns the memory limit: the user's, or an eighth of the state, if so much is free.

    It is raised so that the largest batch of lanes, of `lane_batch_bytes`, fits into a group.
    """
    if options.broadcast_memory_limit_bytes is not None:
        return options.broadcast_memory_limit_bytes
    factor = options.broadcast_memory_scaling_factor or 0.75
    return max(
        1,
        min(
            _MOST, max(_LEAST, state_bytes // _SHARE, lane_batch_bytes * _GROUPS[options.strategy]), int(free * factor)
        ),
    )


def ahead_bytes(limit: int, strategy: Strategy) -> int:
    """Returns the bytes per device of shares that may be read while late ones are waited for: all that groups leave.

    Meanwhile nothing is read directly. One group still travels, and one is being put in place.
    """
    return (_GROUPS[strategy] - 2) * group_bytes(limit, strategy)


def group_bytes(limit: int, strategy: Strategy) -> int:
    """Returns the bytes per device that one group may have, so that all groups under way keep to the limit."""
    return max(1, limit // _GROUPS[strategy])
