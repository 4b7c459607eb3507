"""The time that links need for a restore at least. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.changes import Change

FORMULA = """\
The limit is the least time T in which the hosts' storage links together can carry the state once, and each host's
storage link and fabric link together can carry what that host holds:
`T >= unique / (storage_1 + ... + storage_n)` and `T >= held / (storage_h + fabric)` for every host h. Where rates
change on the way, a rate times T is what the link carries until T if it is always busy. A host's storage rate is at
most its part of the cap. Where one link carries both, T = held / link. The second condition is the best mixture of
`spread` and direct reads: both links of a host are busy to the end (scenario `balanced`)."""


def seconds_needed(
    unique: int, held: float, storage: Sequence[float], fabric: float, changes: Sequence[Change] = ()
) -> float:
    """Returns the limit in seconds, for bytes and bytes per second; infinite if the links never carry them all.

    Args:
      unique: Bytes of the state.
      held: Bytes that each host holds in the end, copies on one host counted once.
      storage: The rate of each host's storage link at the start.
      fabric: The rate of every host's fabric link.
      changes: New rates of storage links. Those that wait for bytes come when the busy links have carried them.
    """
    rates, passed, pending, now = [*storage], [0.0] * len(storage), [*changes], 0.0
    while True:
        for change in [change for change in pending if change.is_due(now + 1e-9, [done + 1e-3 for done in passed])]:
            pending.remove(change)
            for host in change.hosts(len(rates)):
                rates[host] = change.bytes_per_second
        from_storage = _time(unique - sum(passed), sum(rates))
        links = [(held - done - _times(fabric, now), rate + fabric) for done, rate in zip(passed, rates, strict=True)]
        rest = max(from_storage, *(_time(left, rate) for left, rate in links))
        next_change = min((_time_until(change, now, passed, rates) for change in pending), default=math.inf)
        if rest <= next_change:
            return now + rest
        now += next_change
        passed = [done + rate * next_change for done, rate in zip(passed, rates, strict=True)]


def _time(size: float, rate: float) -> float:
    if size <= 0:
        return 0.0
    return size / rate if rate else math.inf


def _times(rate: float, seconds: float) -> float:
    return rate * seconds if seconds else 0.0  # an unlimited rate has carried nothing at the start


def _time_until(change: Change, now: float, passed: Sequence[float], rates: Sequence[float]) -> float:
    hosts = change.hosts(len(rates))
    left = change.bytes - sum(passed[host] for host in hosts)
    return max(0.0, change.seconds - now, _time(left, sum(rates[host] for host in hosts)))
