"""What process 0 and the others read from the service: arrivals, contributions, values by process. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from orbax_ext.meeting.wire import Contribution

BY = "by"  # in a reply with an error: the nonce of the process that has given up
CAME = "came"  # when a process arrived at a meeting, by its own clock


class Arrivals:
    """Who has arrived: the nonce and the payload of each process, and the replies that have been written."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.nonces: dict[int, str] = {}
        self.payloads: dict[int, Contribution] = {}
        self.came: dict[int, float] = {}
        self.replies: dict[tuple[int, str], Mapping[str, Any]] = {}
        for name, value in sorted(found.items()):  # of several arrivals of a process the last one counts
            process, nonce, kind = name.split("/")
            if kind == "in" and value is not None:
                self.nonces[int(process)] = nonce
                self.payloads[int(process)] = value["payload"]
                self.came[int(process)] = float(value[CAME])
            elif kind == "reply":
                self.replies[int(process), nonce] = value or {}

    def standing(self) -> dict[int, str]:
        """Returns the nonces of those who wait for a reply. An arrival with a reply belongs to an earlier session."""
        return {process: nonce for process, nonce in self.nonces.items() if (process, nonce) not in self.replies}


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """The last report of a process."""

    at: float  # when process 0 read the first report with this phase and these bytes
    reported: float  # when process 0 read it
    number: int  # of the report: grows also if the process does not advance
    phase: str
    done: int  # bytes

    def told(self, now: float) -> str:
        return f"last in phase {self.phase!r}, {self.done} bytes done, {now - self.at:.0f} s ago"


def by_process(found: Mapping[str, Any]) -> dict[int, Any]:
    """Returns values by process; leaves out those that are too long and keys that name no process."""
    return {int(name): value for name, value in found.items() if name.isdecimal() and value is not None}


def contributions(found: Mapping[str, Any]) -> dict[int, Any]:
    """Returns the contributions among the keys of a meeting."""
    return by_process({name.removeprefix("in/"): own for name, own in found.items() if name.startswith("in/")})


def missing_from(found: Collection[int], processes: int) -> list[int]:
    return [process for process in range(processes) if process not in found]


def last_of(came: Mapping[int, float], before: Collection[int]) -> int:
    """Returns the process that arrived last by its own clock, among those that process 0 had not seen `before`."""
    return max([process for process in came if process not in before], key=lambda process: (came[process], process))
