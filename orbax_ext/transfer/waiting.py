"""What a process does while it waits at a meeting for others that are late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.plan.course import Course, if_late
from orbax_ext.transfer.compiling import Compiling
from orbax_ext.transfer.exchanges import Exchanges
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.reads import Reads

_LATE = 0.2  # seconds at a meeting after which others are late
_LONG = 3  # times as long as that, when others may soon read in place of a late one


class Waiting:
    """Goes on reading if others are late while nothing travels, and compiles what travels if others read for them."""

    def __init__(
        self,
        course: Course,
        reads: Reads,
        exchanges: Exchanges,
        compiling: Compiling,
        executor: Callable[[Sequence[Leaf]], Executor],
        meshes: Sequence[MeshInfo],
    ) -> None:
        """`executor` makes an executor for a plan with other leaves."""
        self._course = course
        self._reads = reads
        self._exchanges = exchanges
        self._compiling = compiling
        self._executor = executor
        self._meshes = meshes
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Notes that a meeting begins, with the share of this process."""
        self._timer = asyncio.get_running_loop().call_later(_LATE, self._others_are_late, 1)

    def end(self) -> None:
        """Notes that the meeting is over: what is read now has to be told at the next one."""
        if self._timer is not None:
            self._timer.cancel()

    def _others_are_late(self, times: int) -> None:
        idle, further = not self._exchanges.under_way, self._reads.further
        if idle and not further.wanted and further.end():
            further.wanted = True
            self._reads.begin()
        if idle and times == _LONG:
            plan = if_late(self._course, self._meshes)
            self._compiling.of_take_over(self._executor(plan.leaves), plan.groups)
        else:
            self._timer = asyncio.get_running_loop().call_later(_LATE, self._others_are_late, times + idle)
