"""The cost model: from counted bytes and the rates of links to seconds.

Reading and exchanging overlap. A restore takes as long as the slower of the two, and one group's time of the other:

    seconds = START + max(read, exchange) + min(read, exchange) / groups
    read = max(bytes of the busiest process / storage, bytes of all / storage in total) + arrays x PER_ARRAY
    exchange = bytes into the busiest process / fabric + groups x PER_GROUP
"""

from __future__ import annotations

import dataclasses
import math

from orbax_ext.plan.volumes import Load

PER_ARRAY = 0.5e-3  # seconds to open and place one array
PER_GROUP = 30e-3  # seconds for a meeting and the start of an exchange
START = 0.5  # seconds to compile and connect


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second that one process gets while all work at once."""

    storage: float
    fabric: float
    storage_total: float = math.inf  # of all processes together
    how: str = "given"  # or "assumed"

    def __str__(self) -> str:
        return f"storage {self.storage / 1e6:.0f} and fabric {self.fabric / 1e6:.0f} MB/s a process, {self.how}"


def seconds(load: Load, rates: Rates) -> float:
    """Returns how long a load takes."""
    read = max(load.read / rates.storage, load.read_by_all / rates.storage_total) + load.arrays * PER_ARRAY
    if not load.groups:
        return read
    exchange = load.link / rates.fabric + load.groups * PER_GROUP
    return START + max(read, exchange) + min(read, exchange) / load.groups
