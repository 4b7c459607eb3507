"""Shares that a process reads while others are late, and those that it leaves to others because it is late itself."""

from __future__ import annotations

import jax

from orbax_ext.plan.boundary import one_has_ended
from orbax_ext.plan.course import Course
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.own_reads import OwnReads
from orbax_ext.transfer.read_ahead import succeeded


class FurtherReads:
    """Knows how far a process may read ahead while others are late, and what it has not read when it is late."""

    def __init__(
        self, executor: Executor, course: Course, shares: OwnReads, room: int, *, boundary_moves: bool
    ) -> None:
        """`room`: bytes per device for shares that are read while others are late; 0: no more than otherwise."""
        self.wanted = False  # shares are read as far ahead as there is room: others have been late
        self._executor = executor
        self._course = course
        self._shares = shares
        self._room = room
        self._boundary_moves = boundary_moves

    def end(self, waiting: int = 0) -> int:
        """Returns the place before which there is room for shares if one late process stops all exchanges; 0: nowhere.

        So many groups before them are read and do not travel yet. Groups of which others read more need as much room:
        who reads little goes no further, because what somebody may read is not dealt again. If the boundary moves,
        nobody knows before an exchange has ended whether shares are needed.
        """
        ends = self._course.ends
        if not self._room or (self._boundary_moves and not one_has_ended(ends)):
            return 0
        devices, replicas = jax.local_device_count(), self._course.replicas
        place, room = max(0, ends.front - waiting), self._room
        while place < ends.back:
            group = self._course.group(place)
            room -= max(self._executor.share_bytes(group) // devices, group.device_bytes // replicas)
            if room < 0:
                break
            place += 1
        return place

    @property
    def seconds(self) -> float:
        """How long it takes to read the shares that this process may read at a meeting."""
        places = range(self._shares.begun, self.end())
        size = sum(self._executor.share_bytes(self._course.group(place)) for place in places)
        return round(size / self._shares.rate, 3) if self._shares.rate else 0.0

    def lacking(self, upto: int) -> tuple[int, ...]:
        """Returns the groups before a place of which this process has not read its share, by number."""
        read = {place for place in range(self._shares.begun) if self._has_read(place)}
        return tuple(self._course.order[place] for place in range(self._course.ends.front, upto) if place not in read)

    def leave_to_others(self) -> None:
        """Leaves the group at the front to others if its share is not there, and shares that others read instead."""
        front = self._course.ends.front
        stuck = not self._has_read(front)
        others = [
            place
            for place in range(front + 1, self._shares.begun)
            if not self._shares.task(place).done() and not self._executor.share_bytes(self._course.group(place))
        ]
        self._shares.leave([front, *others] if stuck else others, stuck=stuck)

    def _has_read(self, place: int) -> bool:
        return self._shares.has(place) and succeeded(self._shares.task(place))
