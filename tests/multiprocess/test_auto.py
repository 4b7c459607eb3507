"""`auto` reads from both ends, and a restore keeps to the memory limit, as measured."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from bench import memory
from orbax_ext import lab
from orbax_ext.lab import handlers
from orbax_ext.report.process_report import ProcessReport
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.pipeline import Pipeline
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MIB = 1 << 20
MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {f"layer_{number}": Spec((1024, 1024), "float32", P("tp")) for number in range(8)}
LIMIT = 6 * MIB  # of memory: a layer is a group
MEASURED_STATE = {f"layer_{number}": Spec((2048, 2048), "float32", P("tp")) for number in range(8)}
MIXED_MESH = MeshSpec((2, 2, 2), ("dp", "fsdp", "tp"))
MIXED_STATE = {
    **{f"a_{number}": Spec((1024, 1024), "float32", P("tp")) for number in range(8)},
    **{f"b_{number}": Spec((2048, 1024), "float32", P(("fsdp", "tp"))) for number in range(8)},
}
# The moments of an optimizer that is sharded over all devices never travel.
SHARDED_MOMENTS = {
    **STATE,
    **{f"moment_{number}": Spec((1024, 1024), "float32", P(("dp", "tp"))) for number in range(4)},
}
SLICED = {"large": Spec((8192, 1024), "float32", P("tp"))}
HOST_BYTES = 8 * 16 * MIB


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds that are added to reading a group directly, of which a share takes a quarter, and to exchanging it."""

    direct: float
    exchange: float


@dataclasses.dataclass(frozen=True)
class Change:
    """Another pace, from the call of a method of the executor on with which there are so many."""

    after: str
    times: int
    pace: Pace


@pytest.fixture(scope="module")
def layers(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("layers") / "checkpoint")
    small_cluster.run(states.save, path, STATE, MESH)
    small_cluster.run(restore_by_exchanges, path)  # so that no test depends on how long compiling takes
    return path


@pytest.fixture(scope="module")
def large_layers(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers next to which what the allocator does is small."""
    path = str(tmp_path_factory.mktemp("large_layers") / "checkpoint")
    small_cluster.run(states.save, path, MEASURED_STATE, MESH)
    return path


SLOW_STORAGE, SLOW_FABRIC, BOTH = Pace(4.0, 0.0), Pace(0.0, 0.8), Pace(0.3, 0.3)


@pytest.mark.once
def test_slow_storage_makes_it_spread(small_cluster: lab.Cluster, layers: str) -> None:
    for groups, unused in small_cluster.run(restore_at, layers, SLOW_STORAGE):
        assert groups == ["exchange"] * 8
        assert unused == 0


@pytest.mark.once
def test_a_slow_fabric_makes_it_direct_after_the_first_exchange(small_cluster: lab.Cluster, layers: str) -> None:
    (first, _), *others = results = small_cluster.run(restore_at, layers, Pace(0.0, 3.0))
    assert [groups for groups, _ in others] == [first] * 3  # all processes decide the same
    assert first.count("exchange") <= 2
    assert all(unused <= 4 * MIB for _, unused in results)  # of one group, on the two devices of a process


def test_storage_and_fabric_share_the_work_if_they_are_alike(small_cluster: lab.Cluster, layers: str) -> None:
    for groups, _ in small_cluster.run(restore_at, layers, BOTH):
        assert set(groups) == {"exchange", "direct"}
        assert groups == sorted(groups, reverse=True)  # the front travels


@pytest.mark.once
def test_nothing_is_connected_if_all_is_read_before_programs_are_compiled(
    small_cluster: lab.Cluster, layers: str
) -> None:
    for groups, report in small_cluster.run(restore_with_a_slow_compiler, layers):
        assert groups == ["direct"] * 8
        assert "connect" not in [span.phase for span in report.spans]


@pytest.mark.once
def test_one_group_is_read_for_nothing_if_nothing_is_exchanged_between_two_replicas(
    small_cluster: lab.Cluster, path: str
) -> None:
    two = MeshSpec((2, 4), ("dp", "tp"))
    small_cluster.run(states.save, path, STATE, two)
    for groups, report in small_cluster.run(restore_with_a_slow_compiler, path, two):
        assert groups == ["direct"] * 8
        direct = [span.bytes for span in report.spans if span.phase == "read directly"]
        assert direct == [2 * MIB] * 8  # on the two devices of a process
        assert report.bytes_unused == 2 * MIB  # a process reads the share of every other group


@pytest.mark.once
def test_it_exchanges_until_the_fabric_becomes_slow(small_cluster: lab.Cluster, layers: str) -> None:
    later = Change("start_exchange", 3, SLOW_FABRIC)
    first, *others = [groups for groups, _ in small_cluster.run(restore_at, layers, Pace(1.0, 0.0), later)]
    assert others == [first] * 3
    assert 3 <= first.count("exchange") < 8
    assert first == sorted(first, reverse=True)


@pytest.mark.once
def test_it_reads_directly_until_storage_becomes_slow(small_cluster: lab.Cluster, layers: str) -> None:
    later = Change("read_whole", 1, Pace(6.0, 0.0))
    first, *others = [groups for groups, _ in small_cluster.run(restore_at, layers, Pace(0.0, 3.0), later)]
    assert others == [first] * 3
    assert 1 <= first.count("direct") <= 4
    assert first.count("exchange") >= 4  # as long as the fabric is slow, there are at most two
    assert first == sorted(first, reverse=True)


@pytest.mark.once
def test_one_process_with_slow_storage_keeps_all_from_reading_directly(small_cluster: lab.Cluster, layers: str) -> None:
    for groups, _ in small_cluster.run(restore_at, layers, SLOW_FABRIC, slow=(2, Pace(6.0, 0.0))):
        assert groups.count("direct") <= 2


@pytest.mark.once
def test_leaves_that_never_travel_are_read_before_groups_from_the_back(small_cluster: lab.Cluster, path: str) -> None:
    small_cluster.run(states.save, path, SHARDED_MOMENTS, MESH)
    for others, from_the_back in small_cluster.run(restore_sharded_moments, path):
        assert others <= min(from_the_back)


@pytest.mark.once
def test_slices_of_one_leaf_arrive_from_both_ends(small_cluster: lab.Cluster, path: str) -> None:
    small_cluster.run(save_in_chunks, path)
    small_cluster.run(restore_by_exchanges, path, SLICED)
    for groups, _ in small_cluster.run(restore_at, path, BOTH, state=SLICED):
        assert {"exchange", "direct"} == set(groups)


@pytest.mark.once
@pytest.mark.parametrize("end", ["read", "read_whole"])
def test_a_read_error_at_either_end_is_raised_by_all_if_readers_are_strict(
    small_cluster: lab.Cluster, layers: str, end: str
) -> None:
    for outcome in small_cluster.outcomes(restore_with_a_bad_disk, layers, end):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 2 (" in str(outcome)
        assert "OSError: the disk is gone" in str(outcome)


@pytest.mark.once
def test_processes_may_have_different_numbers_of_devices(small_cluster: lab.Cluster, layers: str) -> None:
    uneven = MeshSpec((3, 2), ("dp", "tp"), devices=(0, 1, 2, 3, 4, 6))  # of the four processes: two, two, one and one
    first, *others = [groups for groups, _ in small_cluster.run(restore_at, layers, BOTH, mesh=uneven)]
    assert others == [first] * 3


def test_leaves_with_different_replicas_are_restored_exactly(small_cluster: lab.Cluster, path: str) -> None:
    small_cluster.run(states.save, path, MIXED_STATE, MIXED_MESH)
    small_cluster.run(restore_by_exchanges, path, MIXED_STATE, MIXED_MESH)
    for groups, _ in small_cluster.run(restore_at, path, BOTH, state=MIXED_STATE, mesh=MIXED_MESH):
        assert set(groups) == {"exchange", "direct"}


def test_rates_are_not_needed_any_more(small_cluster: lab.Cluster, layers: str) -> None:
    with pytest.warns(FutureWarning, match="storage_gbps has no effect any more"):
        orbax_ext.BroadcastArrayHandler(storage_gbps=1.0)


def test_array_metadata_is_read_once_for_all_groups(small_cluster: lab.Cluster, layers: str) -> None:
    """The first list, and each of the others by one process, to find out whether it is damaged."""
    assert small_cluster.run(restore_and_count_metadata_reads, layers) == [(1, 8), (2, 8), (2, 8), (2, 8)]


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.once) for name in ("single", "auto")), "spread", "direct"]
)
def test_memory_growth_keeps_to_the_limit(measured_cluster: lab.Cluster, large_layers: str, strategy: str) -> None:
    knobs = {"strategy": strategy, "replica_axis": "dp", "stall_timeout": 60}

    def growths(limit: int) -> list[int]:
        return measured_cluster.run(restore_and_measure, large_layers, {**knobs, "broadcast_memory_limit_bytes": limit})

    slack = 32 * MIB  # for the allocator
    bound = HOST_BYTES + 2 * 16 * MIB + slack
    # What else the machine does can only add to a peak; a restore that ignores the limit exceeds the bound each time.
    attempts: list[list[int]] = []
    while not attempts or (max(attempts[-1]) > bound and len(attempts) < 3):
        attempts.append(growths(16 * MIB))
    assert max(attempts[-1]) <= bound, f"bytes on each process, by attempt: {attempts}; at most {bound}"
    if strategy not in ("auto", "direct"):  # reads at once what is there: how much that is depends on when it comes
        loose = growths(1 << 30)
        assert max(loose) > bound, f"bytes on each process without a limit: {loose}; more than {bound}"


def test_memory_growth_keeps_to_the_limit_while_both_ends_are_at_work(
    measured_cluster: lab.Cluster, large_layers: str
) -> None:
    bound = HOST_BYTES + 2 * 24 * MIB + 32 * MIB  # on two devices; the rest is for the allocator
    attempts: list[list[int]] = []  # as above
    while not attempts or (max(attempts[-1]) > bound and len(attempts) < 3):
        results = measured_cluster.run(restore_from_both_ends_and_measure, large_layers)
        assert all(set(groups) == {"exchange", "direct"} for _, groups in results)
        attempts.append([growth for growth, _ in results])
    assert max(attempts[-1]) <= bound, f"bytes on each process, by attempt: {attempts}; at most {bound}"


# Run on the processes.


def save_in_chunks(path: str) -> None:
    """Saves a leaf in chunks that are much smaller than a device's block, so that it is cut into slices."""
    state = states.make_state(SLICED, MESH.make())
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=MIB // 4), state)
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state, save_args=save_args))


@contextlib.contextmanager
def paced(pace_of: Callable[[], Pace]) -> Iterator[None]:
    """Makes reads and exchanges take longer, by the pace at the time."""
    read, read_whole, start = Executor.read, Executor.read_whole, Executor.start_exchange

    async def slow_share(self: Executor, *args: Any) -> Any:
        await asyncio.sleep(pace_of().direct / 4)
        return await read(self, *args)

    async def slow_whole(self: Executor, *args: Any) -> Any:
        await asyncio.sleep(pace_of().direct)
        return await read_whole(self, *args)

    def slow_exchange(self: Executor, group: Any, contributions: Any) -> Any:
        async def finish() -> Any:
            await asyncio.sleep(pace_of().exchange)
            return await start(self, group, contributions)

        return asyncio.ensure_future(finish())

    replacements = {"read": slow_share, "read_whole": slow_whole, "start_exchange": slow_exchange}
    with contextlib.ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(Executor, name, replacement))
        yield


def restore_at(
    path: str,
    pace: Pace,
    later: Change | None = None,
    slow: tuple[int, Pace] | None = None,
    state: Mapping[str, Spec] = STATE,
    mesh: MeshSpec = MESH,
) -> tuple[list[str], int]:
    """Restores at a pace, at another one later, and on one process at a pace of its own."""
    calls = 0

    def pace_now() -> Pace:
        if slow is not None and slow[0] == jax.process_index():
            return slow[1]
        return later.pace if later is not None and calls >= later.times else pace

    with contextlib.ExitStack() as stack:
        stack.enter_context(paced(pace_now))
        if later is not None:
            method = getattr(Executor, later.after)

            def call_and_count(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                return method(*args)

            stack.enter_context(mock.patch.object(Executor, later.after, call_and_count))
        # Eight groups. A process that is slow on purpose is waited for: it shows how the boundary moves.
        knobs = {"strategy": "auto", "broadcast_memory_limit_bytes": LIMIT, "late_seconds": math.inf}
        report = states.restore_exactly(path, knobs, state, mesh)
    return ends_of(report), report.own.bytes_unused


def ends_of(report: Any) -> list[str]:
    """Returns how each group was restored, from the front to the back."""
    ends = {span.group: "exchange" for span in report.own.spans if span.phase == "exchange"}
    back = {span.group: "direct" for span in report.own.spans if span.phase == "read directly"}
    assert all(span.bytes > 0 for span in report.own.spans if span.phase == "read directly")
    assert not set(ends) & set(back)
    assert sorted(ends | back) == list(range(len(ends | back)))
    return [(ends | back)[group] for group in sorted(ends | back)]


def restore_with_a_slow_compiler(path: str, mesh: MeshSpec = MESH) -> tuple[list[str], ProcessReport]:
    """Restores with programs that are compiled once all groups have been read directly."""
    compile_all, read_whole, read = Executor.compile, Executor.read_whole, 0

    async def read_and_count(*args: Any) -> Any:
        nonlocal read
        arrays = await read_whole(*args)
        read += 1
        return arrays

    async def slowly(self: Executor, groups: Any) -> None:
        deadline = time.monotonic() + 60
        while read < len(STATE) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await compile_all(self, groups)

    with mock.patch.object(Executor, "compile", slowly), mock.patch.object(Executor, "read_whole", read_and_count):
        knobs = {"strategy": "auto", "broadcast_memory_limit_bytes": LIMIT, "late_seconds": math.inf}
        report = states.restore_exactly(path, knobs, STATE, mesh)
    return ends_of(report), report.own


def restore_with_a_bad_disk(path: str, end: str) -> None:
    async def fail(*args: Any) -> None:
        raise OSError("the disk is gone")

    with paced(lambda: BOTH), contextlib.ExitStack() as stack:
        if jax.process_index() == 2:
            stack.enter_context(mock.patch.object(Executor, end, fail))
        knobs = {"strategy": "auto", "broadcast_memory_limit_bytes": LIMIT, "strict_readers": True}
        states.restore(path, STATE, MESH, knobs=knobs)


def restore_and_count_metadata_reads(path: str) -> tuple[int, int]:
    """Returns how many lists of all arrays this process reads, and the number of groups."""
    read, count = ArrayMetadataStore._get_array_metadatas, 0

    async def read_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return await read(*args, **kwargs)

    with mock.patch.object(ArrayMetadataStore, "_get_array_metadatas", read_and_count):
        knobs = {"strategy": "spread", "broadcast_memory_limit_bytes": 4 * MIB}
        report = states.restore_exactly(path, knobs, STATE, MESH)
    return count, report.groups


def restore_sharded_moments(path: str) -> tuple[float, list[float]]:
    """Returns when all leaves were read that never travel, and when groups from the back began to be read."""
    knobs = {"strategy": "auto", "broadcast_memory_limit_bytes": LIMIT, "late_seconds": math.inf}
    with paced(lambda: BOTH):
        spans = states.restore_exactly(path, knobs, SHARDED_MOMENTS, MESH).own.spans
    (others,) = [span.end for span in spans if span.phase == "read" and span.group is None]
    return others, [span.start for span in spans if span.phase == "read directly"]


def restore_by_exchanges(path: str, state: Mapping[str, Spec] = STATE, mesh: MeshSpec = MESH) -> None:
    """Restores with the programs that `restore_at` needs, so that these are compiled afterwards."""
    knobs = {"strategy": "auto", "broadcast_memory_limit_bytes": LIMIT}
    with mock.patch.object(Pipeline, "_move_boundary"):  # else all may be read directly, without any program
        states.restore(path, state, mesh, knobs=knobs)


def restore_and_measure(path: str, knobs: dict[str, object]) -> int:
    abstract = states.abstract_state(MEASURED_STATE, MESH.make())
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with handlers.registered("ours", **knobs), ocp.CheckpointManager(path) as manager:
        with mock.patch.object(Pipeline, "_move_boundary"):  # `auto` would read all directly
            manager.restore(0, args=args)  # compiles, so that compiled programs do not count
        return memory.peak_growth(lambda: manager.restore(0, args=args))


def restore_from_both_ends_and_measure(path: str) -> tuple[int, list[str]]:
    knobs = {"strategy": "auto", "broadcast_memory_limit_bytes": 24 * MIB, "late_seconds": math.inf}
    with paced(lambda: BOTH):
        growth = restore_and_measure(path, knobs)
    return growth, ends_of(orbax_ext.last_report())
