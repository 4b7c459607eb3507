"""How `auto` divides a restore: groups before the boundary travel, the others are read directly by every process.

Groups are read and exchanged from the front. Whenever all processes have nothing left to read, because exchanges are
what they wait for, the boundary moves: groups from the back are read directly meanwhile. It moves at meetings only, by
a function of what the processes have really done so far, so all compute the same. The restore ends where the two meet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_ext.plan.planner import RestorePlan
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import Loads

PREPARING = 0.5  # seconds: the least that compiling and connecting take where that was not done before


@dataclasses.dataclass(frozen=True)
class GroupBytes:
    """What a group asks of the process that it asks most of."""

    share: int  # read from storage if it travels
    direct: int  # read from storage if it does not
    link: int  # received over the fabric if it travels


@dataclasses.dataclass(frozen=True)
class Ends:
    """How far a restore is, the same on all processes."""

    front: int  # groups whose exchange has begun
    back: int  # the boundary: groups from this number on are read directly


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one process has done when it comes to a meeting."""

    begun: int  # groups of which it has read its share, or has begun to
    direct: int  # groups that it has read directly
    ready: bool  # for the next exchange: share read, programs compiled, and the exchange before is half over
    idle: bool  # it has nothing to read
    waiting: float  # seconds since it has begun: the end of the first exchange may take as long again
    storage: float  # bytes per second that it reads
    fabric: float  # bytes per second that it receives in exchanges; 0 before the first one has ended
    unused: int = 0  # bytes of shares that it has read in this restore and that do not travel yet
    held: int = 0  # groups, from the last on, that it has read as a whole before this restore

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        return cls(**{field.name: data[field.name] for field in dataclasses.fields(cls)})


def shares_ahead(most: int, replicas: int, ends: Ends) -> int:
    """Returns how many shares a process may read beyond the one that is exchanged next: at most `most`.

    Until an exchange has ended nobody knows whether shares are needed: then all that are read are one group at most.
    """
    return most if one_has_ended(ends) else min(most, replicas - 1)


def one_has_ended(ends: Ends) -> bool:
    """Returns whether an exchange has ended."""
    return ends.front > 1  # the second one begins after that


def bytes_of_groups(plan: RestorePlan, meshes: Sequence[MeshInfo], processes: int) -> list[GroupBytes]:
    """Returns what each group of a plan asks of the processes."""
    loads = Loads(plan.leaves, meshes, processes)
    counted = []
    for group in plan.groups:
        travelling, direct = loads.travelling([group]), loads.direct(group.leaves)
        counted.append(GroupBytes(travelling.read, direct.read, travelling.link))
    return counted


def next_boundary(groups: Sequence[GroupBytes], ends: Ends, progress: Sequence[Progress]) -> int:
    """Returns the new boundary, given the progress of all processes: `ends.back`, or less.

    It moves to the groups that all hold already. Else it moves only if no process has anything to read, and little
    experience decides little: before the first exchange has ended no further than that the groups that are read
    directly double, later that they triple, if so many were exchanged.
    """
    if (held := max(ends.front, len(groups) - min(one.held for one in progress))) < ends.back:
        return held
    if not everything_is_read(groups, ends, progress):
        return ends.back
    untouched = min(ends.back, max(ends.front, *(one.begun for one in progress)))
    direct = len(groups) - ends.back
    if all(one.fabric for one in progress):
        best = best_boundary(groups, ends, untouched, progress)
        most = max(1, direct, min(ends.front, 2 * direct))
        return best if best == ends.front else max(best, ends.back - most)
    least = max(untouched, ends.back - max(1, direct))
    ready = all(one.ready for one in progress)
    waiting = max(one.waiting for one in progress)
    only_reads = seconds_direct(groups, ends, progress) < waiting + (0.0 if ready else PREPARING)
    if only_reads and not ends.front and not ready and not _held(groups, untouched):
        return ends.front  # before anything is compiled for exchanges
    # Nobody knows yet how long an exchange takes, and storage would be idle meanwhile. The first one may end as late
    # again as it is now: a group that takes longer than that to read directly is better left to it.
    if least < ends.back and not ready and _seconds_of_last(groups, ends, progress) <= waiting:
        return least
    return ends.front if only_reads else ends.back


def _held(groups: Sequence[GroupBytes], untouched: int) -> bool:
    """Returns whether somebody has much more for exchanges than is read before the first one: read ahead, for example.

    That is one group at most (`shares_ahead`), and some bytes more where shares are not equal.
    """
    shares = sum(group.share for group in groups[:untouched])
    return shares > 1.5 * max((group.direct for group in groups), default=0)


def everything_is_read(groups: Sequence[GroupBytes], ends: Ends, progress: Sequence[Progress]) -> bool:
    """Returns whether all processes have read what they may read, and could read all groups from the back."""
    return all(one.idle and one.direct == len(groups) - ends.back for one in progress)


def best_boundary(
    groups: Sequence[GroupBytes], ends: Ends, untouched: int, progress: Sequence[Progress], others: int = 0
) -> int:
    """Returns the boundary with which the rest of the restore is expected to take least.

    `others` are bytes that storage has to read besides: of leaves that never travel.
    That is one at `untouched` or later: nobody has read shares of those groups. Or it is the front: no more exchanges,
    if nobody has read more than a group for them.
    """
    storage = min(one.storage for one in progress)
    fabric = min(one.fabric for one in progress)

    def seconds(back: int) -> float:
        shares = sum(group.share for group in groups[untouched:back])
        direct = sum(group.direct for group in groups[back : ends.back])
        links = sum(group.link for group in groups[ends.front : back])
        return max((others + shares + direct) / storage, links / fabric)

    best = min(range(ends.back, untouched - 1, -1), key=seconds)
    one_group = max((group.direct for group in groups), default=0)
    if max(one.unused for one in progress) > one_group:
        return best
    only_reads = others / storage + seconds_direct(groups, ends, progress)
    return ends.front if only_reads < seconds(best) else best


def meet_again_after(groups: Sequence[GroupBytes], ends: Ends, progress: Sequence[Progress]) -> float:
    """Returns the seconds after the beginning when the boundary may move though no exchange has ended, or infinity."""
    if all(one.fabric for one in progress) or not everything_is_read(groups, ends, progress):
        return math.inf
    after = _seconds_of_last(groups, ends, progress)
    return after if after > max(one.waiting for one in progress) else math.inf


def _seconds_of_last(groups: Sequence[GroupBytes], ends: Ends, progress: Sequence[Progress]) -> float:
    """Returns how long reading the next group from the back directly takes the fastest process.

    Others may only have been busy when they began.
    """
    return groups[ends.back - 1].direct / max(one.storage for one in progress)


def seconds_direct(groups: Sequence[GroupBytes], ends: Ends, progress: Sequence[Progress]) -> float:
    """Returns how long it takes to read all groups directly that are left."""
    return sum(group.direct for group in groups[ends.front : ends.back]) / min(one.storage for one in progress)


def part_of_first_share(groups: Sequence[GroupBytes]) -> float:
    """Returns the first group's share as a part of all that a process would read directly; 1 if nothing is counted."""
    return groups[0].share / max(1, sum(group.direct for group in groups)) if groups else 1.0
