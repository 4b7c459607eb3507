"""Words of the protocol: how long to wait, who a process is, what it learns while it works. Pure."""

from __future__ import annotations

import dataclasses
import enum
import math

MAX_VALUE = 1 << 16  # characters of one process's contribution to a meeting


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait: `stall` seconds without progress of any process, `total` seconds in all.

    Where a late process can come to a meeting without its work, the others wait `late` seconds for it, or longer if
    they needed longer themselves.
    """

    stall: float = 300.0
    total: float | None = None
    late: float = math.inf

    @property
    def patience(self) -> float:
        """The seconds to wait for a late process: `late`, but long before the restore fails."""
        return self.late if math.isinf(self.late) else min(self.late, self.stall / 12)

    @property
    def silence(self) -> float:
        """The seconds after which the others give up a process that makes no progress."""
        return self.stall if self.total is None else min(self.stall, self.total)

    def __str__(self) -> str:
        return f"stall_timeout={self.stall:g}" + ("" if self.total is None else f", timeout={self.total:g}")


@dataclasses.dataclass(frozen=True)
class Place:
    """Who a process is: its index, the number of processes, its host, and what it takes part in.

    `attempt` is what the processes have agreed to try. An absence that was announced in another attempt does not count.
    """

    process: int
    processes: int
    host: str
    attempt: str = ""


class Word(enum.Enum):
    """What a process that works learns about the next meeting."""

    NONE = ""
    FAILED = "failed"  # nobody waits for the work any more
    ASKED = "asked"  # the others wait for nobody else, and do not want to wait longer
