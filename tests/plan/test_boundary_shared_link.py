"""Where `auto` divides a restore if storage and fabric are one link, tried on hosts that all do the same."""

from __future__ import annotations

import pytest

from orbax_ext.plan.boundary import Ends, GroupBytes, Progress, next_boundary, shares_ahead
from orbax_ext.plan.memory import AHEAD

pytestmark = pytest.mark.once

STEP = 0.01  # seconds
RATE = 1000.0  # bytes per second of a link
REPLICAS = 4
COMPILED = 0.3  # when programs are


class Host:
    """A host that reads and exchanges at the same time, over one link or two. Storage serves one read at a time."""

    def __init__(self, groups: list[GroupBytes], *, shared: bool) -> None:
        self.groups = groups
        self.ends = Ends(0, len(groups))
        self.now = 0.0
        self.meetings = 0
        self.shares = self.back_done = 0  # that are read
        self._shared = shared
        self._reading = ""  # "share" or "back"
        self._to_read = self._to_exchange = 0.0  # bytes of what is under way
        self._read = self._received = 0.0  # bytes
        self._read_for = self._exchanged_for = 0.0  # seconds
        self._told = (-1, -1)

    def restore(self) -> float:
        """Returns the seconds of a restore."""
        while self.ends.front < self.ends.back or self._to_exchange or self._back_left:
            self._pass_time()
            if self.ends.front < self.ends.back and (self._ready or (self._idle and self._told != self._so_far)):
                self._meet()
        return self.now

    @property
    def _upto(self) -> int:
        return min(self.ends.front + 1 + shares_ahead(AHEAD["spread"], REPLICAS, self.ends), self.ends.back)

    @property
    def _back_left(self) -> int:
        return len(self.groups) - self.ends.back - self.back_done

    @property
    def _so_far(self) -> tuple[int, int]:
        return self.shares, self.back_done

    @property
    def _idle(self) -> bool:
        return not self._reading and self.shares >= self._upto and not self._back_left

    @property
    def _ready(self) -> bool:
        return self.now >= COMPILED and self.shares > self.ends.front and not self._to_exchange

    def _pass_time(self) -> None:
        if not self._reading and self.shares < self._upto:
            self._reading, self._to_read = "share", self.groups[self.shares].share
        elif not self._reading and self._back_left:
            self._reading, self._to_read = "back", self.groups[-1 - self.back_done].direct
        size = RATE * STEP / (2 if self._shared and self._reading and self._to_exchange else 1)
        self.now += STEP
        if self._reading:
            count = min(size, self._to_read)
            self._to_read, self._read, self._read_for = self._to_read - count, self._read + count, self._read_for + STEP
        if self._to_exchange:
            count = min(size, self._to_exchange)
            self._to_exchange, self._received = self._to_exchange - count, self._received + count
            self._exchanged_for += STEP
        if self._reading and not self._to_read:
            self.shares += self._reading == "share"
            self.back_done += self._reading == "back"
            self._reading = ""

    def _meet(self) -> None:
        self.meetings += 1
        self._told = self._so_far
        begun = self.shares + (self._reading == "share")
        storage = self._read / self._read_for
        fabric = self._received / self._exchanged_for if self._received else 0.0
        progress = Progress(begun, self.back_done, self._ready, self._idle, self.now, storage, fabric)
        ready = self._ready
        self.ends = Ends(self.ends.front, next_boundary(self.groups, self.ends, [progress] * REPLICAS))
        if ready and self.ends.front < self.ends.back:
            self._to_exchange = self.groups[self.ends.front].link
            self.ends = Ends(self.ends.front + 1, self.ends.back)


@pytest.mark.parametrize("count", [16, 64])
def test_no_time_is_lost_on_one_link_for_storage_and_fabric(count: int) -> None:
    size = 16_000 // count
    groups = [GroupBytes(size // 4, size, 3 * size // 4)] * count
    assert Host(groups, shared=True).restore() <= 16.5  # both `spread` and direct reads take 16 s
    assert Host(groups, shared=False).restore() <= 9.5  # a mixture is best: exchanges take 12 s, direct reads 16


def test_slow_storage_is_spread_on_one_link() -> None:
    host = Host([GroupBytes(250, 1000, 10)] * 16, shared=True)
    assert host.restore() <= 4.5
    assert (host.ends, host.meetings) == (Ends(16, 16), 16)
