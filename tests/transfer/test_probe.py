"""A process reads a share that nobody needs to measure its rate, and only then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbax_ext.plan import Group
from orbax_ext.plan.course import Share
from orbax_ext.report.recorder import Recorder
from orbax_ext.storage import counters
from orbax_ext.transfer.rates import LinkRates
from orbax_ext.transfer.reads import Reads
from tests.support.courses import make_course

pytestmark = pytest.mark.once


class OneProcess:
    """Stands in for the executor of a process that is a replica."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.read_groups: list[Group] = []
        self.looks = 0

    def share_bytes(self, group: Group) -> int:
        self.looks += 1  # costs time: it makes all that is read
        return 100 if self.process in {bundle.reader for bundle in group.bundles} else 0

    async def read(self, group: Group, held: Any = None) -> list[Any]:
        self.read_groups.append(group)
        return []


@pytest.mark.parametrize(
    ("process", "compare", "long", "expected"),
    [(1, True, True, 1), (2, True, True, 0), (0, True, True, 0), (1, False, True, 0), (1, True, False, 0)],
)
def test_the_next_replica_is_compared_once_with_a_reader_that_has_read_for_long(
    process: int, compare: bool, long: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        course, executor, recorder, held = make_course("single"), OneProcess(process), Recorder(), object()
        reads = Reads(
            executor,  # type: ignore[arg-type]
            course,
            recorder,
            LinkRates([]),
            boundary_moves=False,
            room=0,
            reason=lambda number: "",
            held=held,  # type: ignore[arg-type]
            arrived=lambda arrays: None,
        )
        read = counters.bytes_read()
        monkeypatch.setattr(counters, "bytes_read", lambda: read + 100 * len(executor.read_groups))
        course.deal({0: Share(1, 1e6, long=long), 1: Share(1), 2: Share(1), 3: Share(1)})
        for number in range(3):
            reads.probe(number, compare=compare)
            await asyncio.sleep(0.01)
        assert len(executor.read_groups) == expected
        assert bool(executor.looks) == (compare and long)
        assert recorder.bytes_again == 100 * expected
        assert (reads.shares.rate is not None) == bool(expected)

    asyncio.run(case())
