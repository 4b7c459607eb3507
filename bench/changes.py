"""Changes of storage links during a restore: a host that is slow, a link that is dead or stops, storage that turns."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

_HORIZON = 120.0  # seconds of a restore in which links stop


@dataclasses.dataclass(frozen=True)
class Change:
    """A new rate of one host's storage link, or of every host's, from a moment of the restore on."""

    rate: int  # Mbit/s, each way; 0: nothing passes
    host: int | None = None  # None: every host
    seconds: float = 0.0  # since the restore began
    bytes: int = 0  # that have passed the host's link since then; for every host: all their links together

    @property
    def bytes_per_second(self) -> float:
        return self.rate * 1e6 / 8

    @property
    def from_the_start(self) -> bool:
        return not self.seconds and not self.bytes

    def hosts(self, count: int) -> Sequence[int]:
        """Returns the hosts whose link changes, out of `count`."""
        return range(count) if self.host is None else [self.host]

    def is_due(self, seconds: float, passed: Sequence[float]) -> bool:
        """Returns whether the moment has come, given the bytes that have passed each host's link."""
        return seconds >= self.seconds and sum(passed[host] for host in self.hosts(len(passed))) >= self.bytes


def stops(hosts: int, rate: int, seed: int, seconds: float = 2.0, most_between: float = 6.0) -> tuple[Change, ...]:
    """Returns changes that stop every host's link for some seconds at random moments, the same for the same seed.

    Between two stops of a host lie at most `most_between` seconds, half of that on average.
    """
    changes = []
    for host in range(hosts):
        moments = random.Random(f"{seed}/{host}")
        at = moments.uniform(0, most_between)
        while at < _HORIZON:
            changes += [Change(0, host, at), Change(rate, host, at + seconds)]
            at += seconds + moments.uniform(0, most_between)
    return tuple(sorted(changes, key=lambda change: change.seconds))
