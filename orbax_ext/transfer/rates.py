"""How fast a process reads and receives, measured on what a restore does anyway."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Sequence

from orbax_ext.plan.boundary import GroupBytes

_FEW = 5  # measurements
_OLD = 10.0  # seconds after which a measurement says little about how fast a link is now


class Stopwatch:
    """Measures the time during which at least one `with` block is inside it."""

    def __init__(self) -> None:
        self._inside = 0
        self._since = 0.0
        self._before = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds measured so far."""
        return self._before + (time.monotonic() - self._since if self._inside else 0.0)

    @property
    def part(self) -> float:
        """The part of the time since it first ran in which it ran; 1 before that."""
        return 1.0 if self._began is None else self.seconds / max(1e-6, time.monotonic() - self._began)

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
            self._began = self._since if self._began is None else self._began
        self._inside += 1

    def __exit__(self, *error: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._before += time.monotonic() - self._since


class LatestRate:
    """A rate over the last few measurements, so that it follows when links change."""

    def __init__(self, at_least: float = 0.0) -> None:
        """Takes more than a few measurements, as long as they are new, if those took less than `at_least` seconds."""
        self._at_least = at_least
        # The amount so far, the seconds that it has taken, and when it was measured.
        self._seen: collections.deque[tuple[float, float, float]] = collections.deque([(0.0, 0.0, 0.0)])

    def add(self, amount: float, seconds: float) -> None:
        """Adds a measurement: the amount so far, and the seconds that it has taken. One without news is ignored."""
        if amount <= self._seen[-1][0]:
            return
        now = time.monotonic()
        self._seen.append((amount, seconds, now))
        while len(self._seen) > _FEW + 1 and (
            seconds - self._seen[1][1] >= self._at_least or now - self._seen[1][2] > _OLD
        ):
            self._seen.popleft()

    @property
    def seconds(self) -> float:
        """How long these measurements have taken."""
        return self._seen[-1][1] - self._seen[0][1]

    @property
    def latest(self) -> float:
        """The amount per second; 0 before the first measurement."""
        (before, since, _), (amount, seconds, _) = self._seen[0], self._seen[-1]
        return (amount - before) / max(seconds - since, 1e-6)

    @property
    def usual(self) -> float:
        """The same without the measurement that took longest, if there are some: one stop says nothing."""
        if len(self._seen) < _FEW:
            return self.latest
        measured = sorted(
            (seconds - since, amount - was) for (was, since, _), (amount, seconds, _) in itertools.pairwise(self._seen)
        )[:-1]
        return sum(amount for _, amount in measured) / max(sum(seconds for seconds, _ in measured), 1e-6)


class LinkRates:
    """Bytes per second from storage and over the fabric. Bytes are those that the plan counts for a group."""

    def __init__(self, groups: Sequence[GroupBytes]) -> None:
        self.storage_busy = Stopwatch()
        self.fabric_busy = Stopwatch()
        self._groups = groups
        self.bytes_read = 0.0
        self._storage = LatestRate()
        self._fabric = LatestRate()

    @property
    def fabric(self) -> float:
        return self._fabric.latest

    @property
    def storage(self) -> float:
        self._storage.add(self.bytes_read, self.storage_busy.seconds)
        return max(1.0, self._storage.latest)

    def share_read(self, place: int, part: float) -> None:
        """Takes note that the share of a group was read; `part` of what the plan asked for, if it was dealt again."""
        if self._groups:
            self.bytes_read += part * self._groups[place].share

    def group_read(self, place: int) -> None:
        """Takes note that a group was read directly."""
        if self._groups:
            self.bytes_read += self._groups[place].direct

    def leaves_read(self, count: int) -> None:
        """Takes note of the bytes of leaves that never travel."""
        self.bytes_read += count

    def half_of_exchange(self, place: int) -> float | None:
        """Returns half of the seconds that an exchange is expected to take; None before the first one has ended."""
        return 0.5 * self._groups[place].link / self.fabric if self.fabric else None

    def exchanged(self, count: int) -> None:
        """Takes note that the first `count` groups have arrived."""
        self._fabric.add(sum(group.link for group in self._groups[:count]), self.fabric_busy.seconds)
