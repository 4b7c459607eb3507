"""How often a process comes to meetings that decide nothing new."""

from __future__ import annotations

import asyncio
import gc
import types
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from unittest import mock

import jax
import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Group, Leaf, MeshInfo
from orbax_ext.plan.planner import make_plan
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer import pipeline as pipelines
from orbax_ext.transfer.kept_reads import KeptReads
from orbax_ext.transfer.pipeline import Pipeline

pytestmark = pytest.mark.once

MIB = 1 << 20
PROCESSES = 4
HOSTS = {process: f"host-{process}" for process in range(PROCESSES)}
MESH = MeshInfo(("dp", "tp"), (PROCESSES, 2), tuple(number // 2 for number in range(2 * PROCESSES)))
LEAVES = [
    Leaf(f"{n}", (1024, 512), "float32", 4, (512, 512), 0, (("tp",), ()), (32, 512), divisible=True) for n in range(8)
]
FAILED = {"error": "OSError: no disk", "traceback": "", "kind": "OSError"}
TOLD_BY_TWO = Callable[[dict[str, Any]], Mapping[str, Any]]


class Storage:
    """Stands in for an executor: all is read at once, compiled and exchanged when the test says so."""

    def __init__(self) -> None:
        self.compiled = asyncio.Event()
        self.compiling = False
        self.direct = mock.Mock()
        self.kept = KeptReads()
        self.exchanges: list[asyncio.Future[dict[int, Any]]] = []
        self.may_read_whole = asyncio.Event()
        self.may_read_whole.set()

    def is_compiled(self, groups: object) -> bool:
        return self.compiled.is_set()

    async def compile(self, groups: object) -> None:
        self.compiling = True
        await self.compiled.wait()

    async def read(self, group: Group, held: object = None) -> list[Any]:
        return []

    async def read_whole(self, group: Group, all_read: object, held: object = None) -> dict[int, Any]:
        await self.may_read_whole.wait()
        return {}

    async def read_direct(self, *args: object) -> dict[int, Any]:
        return {}

    async def connect(self, groups: object) -> None:
        pass

    def start_exchange(self, group: Group, contributions: object) -> asyncio.Future[dict[int, Any]]:
        self.exchanges.append(asyncio.get_running_loop().create_future())
        return self.exchanges[-1]

    def take_part(self, group: Group) -> None:
        pass

    def share_bytes(self, group: Group) -> int:
        return MIB

    def whole_bytes(self, leaves: object) -> int:
        return MIB

    def extend(self, leaves: object) -> None:
        pass


class Meetings:
    """The meetings of one process with others that tell the same, but for process 2."""

    def __init__(self, storage: Storage) -> None:
        self.count = 0
        self.storage = storage
        request = types.SimpleNamespace(mesh_infos=[MESH], leaves=LEAVES, leaf_requests=())
        options = Options()
        plan = make_plan(LEAVES, [MESH], options, processes=PROCESSES, group_bytes=MIB)
        self.pipeline = Pipeline(None, request, plan, Recorder(), options)  # type: ignore[arg-type]

    async def hold(self, told_by_two: TOLD_BY_TWO = lambda told: told) -> bool:
        """Comes to one meeting, which takes a moment; returns whether an exchange begins."""
        await self.pipeline.read()
        told = self.pipeline.progress()
        await asyncio.sleep(0.01)
        self.count += 1
        by_process = {process: told_by_two(told) if process == 2 else told for process in HOSTS}
        return self.pipeline.agree(by_process, HOSTS)

    async def hold_for(self, seconds: float, told_by_two: TOLD_BY_TWO = lambda told: told) -> int:
        """Comes to meetings for some time; returns how many there were."""
        before = self.count

        async def hold_all() -> None:
            while True:
                assert not await self.hold(told_by_two)

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hold_all(), seconds)
        return self.count - before


@pytest.fixture(autouse=True)
def one_of_four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: PROCESSES)


def run(case: Callable[[Meetings], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def limited() -> None:
        storage = Storage()
        monkeypatch.setattr(pipelines, "Executor", lambda *args: storage)
        meetings = Meetings(storage)
        with meetings.pipeline:
            await asyncio.wait_for(case(meetings), 20)

    asyncio.run(limited())


def test_there_is_nothing_to_meet_for_while_one_process_lacks_a_group_from_the_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(meetings: Meetings) -> None:
        def lacks_one(told: dict[str, Any]) -> dict[str, Any]:
            return {**told, "direct": max(0, told["direct"] - 1), "storage": MIB}  # what is left takes many seconds

        assert await meetings.hold_for(1.0, lacks_one) < 10

    run(case, monkeypatch)


def test_the_boundary_moves_when_the_last_one_has_read_though_others_still_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(meetings: Meetings) -> None:
        def reads(told: dict[str, Any]) -> dict[str, Any]:
            return {**told, "ready": True, "idle": False, "storage": MIB}

        assert await meetings.hold_for(1.0, reads) < 10
        ends = meetings.pipeline.course.ends
        # A group takes half a second, less than has passed, and all of them four.
        assert not await meetings.hold(lambda told: {**told, "ready": True, "storage": 4 * MIB})
        assert meetings.pipeline.course.ends.back < ends.back

    run(case, monkeypatch)


def test_there_is_nothing_to_meet_for_while_the_first_exchange_travels_after_a_take_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(meetings: Meetings) -> None:
        pipeline = meetings.pipeline

        def not_fast(told: dict[str, Any]) -> dict[str, Any]:
            return {**told, "storage": 4 * MIB, "waiting": 0.0}  # the three groups that are left take 1.5 s directly

        while pipeline.course.ends.back > 3:
            assert not await meetings.hold(not_fast)
        assert not await meetings.hold(not_fast)
        assert pipeline.course.ends.back == 3
        meetings.storage.compiled.set()
        assert await meetings.hold(lambda told: {**told, "failed": FAILED})
        pipeline.start_exchange()
        assert await meetings.hold_for(2.5) < 10

    run(case, monkeypatch)


def test_what_is_read_sooner_than_programs_are_compiled_takes_one_meeting_and_no_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(meetings: Meetings) -> None:
        assert not await meetings.hold()
        assert not meetings.pipeline.course.groups_left
        await asyncio.sleep(0.2)
        assert not meetings.storage.compiling

    run(case, monkeypatch)


def test_a_restore_that_has_ended_is_freed_before_python_collects_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        storage = Storage()
        monkeypatch.setattr(pipelines, "Executor", lambda *args: storage)
        pipeline = Meetings(storage).pipeline
        freed = weakref.ref(pipeline)
        with pipeline:
            await pipeline.read()
        del pipeline
        for _ in range(10):  # tasks that were cancelled end
            await asyncio.sleep(0)
        assert freed() is None

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(case(), 20))
    finally:
        gc.enable()


def test_the_restore_is_not_over_while_a_process_that_was_asked_to_come_waits_for_an_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(meetings: Meetings) -> None:
        pipeline, storage = meetings.pipeline, meetings.storage
        pipeline.start_exchange()
        pipeline._reads.back.begin(pipeline.course.move_boundary(pipeline.course.ends.front))
        storage.may_read_whole.clear()
        reading = asyncio.ensure_future(pipeline.read())
        await asyncio.sleep(0.01)
        (exchange,) = storage.exchanges
        pipeline.ask(1)
        await reading
        storage.may_read_whole.set()
        while pipeline._reads.back.lacking:  # the last read ends just now
            await asyncio.sleep(0)
        told = pipeline.progress()
        assert told["busy"]
        assert not pipeline.agree(dict.fromkeys(HOSTS, told), HOSTS)
        assert not pipeline.done
        exchange.set_result({})
        assert not await meetings.hold()
        assert pipeline.done

    run(case, monkeypatch)
