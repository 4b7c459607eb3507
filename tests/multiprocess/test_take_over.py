"""A reader that is late, stalls or fails is taken over by others, at every step of a restore."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer import collectives, own_reads
from orbax_ext.transfer.executor import Executor
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MIB = 1 << 20
SLOW_RATE = 2 * MIB  # bytes per second
MESH = MeshSpec((4, 2), ("dp", "tp"))  # each process is a replica
WIDE = MeshSpec((2, 4), ("dp", "tp"))  # two processes make a replica: 0 and 2 hold the same, and 1 and 3
COPIES = MeshSpec((2, 2, 2), ("dp", "tp", "ep"))  # the same, but each process has two copies of what it holds


def _state(rows: int) -> dict[str, Spec]:
    lane, cut = Spec((rows, 1024), "float32", P("tp")), Spec((rows, 2048), "bfloat16", P("tp"))
    return {
        **{f"lane_{number}": lane for number in range(8)},  # whole, one for each replica
        **{f"cut_{number}": cut for number in range(8)},  # cut among the replicas
        "odd": Spec((3, 1400 * rows + 1), "float32"),  # read by one replica
        **{f"small_{number}": Spec((64, 7 + number), "int8", P("tp")) for number in range(20)},
        "scalar": Spec((), "float32"),
        "own": Spec((64, 8), "float32", P(("dp", "tp"))),  # no two processes have the same of it, so it never travels
    }


STATE = _state(256)
LARGE_STATE = _state(512)  # of which groups are large enough for others to learn how fast a host reads


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What goes wrong with the reads of some processes: from a read on, for some reads."""

    ranks: tuple[int, ...]
    kind: str  # "delay", "stall", "error", or "recovery": the last of `ranks` reads again, the others stall
    first: int = 0  # the first share with a trouble; -1 is the last one
    count: int = 1000
    end: str = "read"  # or "read_whole", for what `auto` reads directly, "both", or "read_direct"

    @property
    def taken_over(self) -> tuple[int, ...]:
        return self.ranks[:-1] if self.kind == "recovery" else self.ranks

    @property
    def here(self) -> Trouble:
        """The trouble as this process has it."""
        if jax.process_index() not in self.ranks:
            return Trouble((), "none")
        return dataclasses.replace(self, count=1) if self.recovers else self

    @property
    def seconds(self) -> float:
        """How long a read of this process takes."""
        if self.recovers:
            return 6
        return 2 if self.kind == "delay" else 1000

    @property
    def recovers(self) -> bool:
        return self.kind == "recovery" and jax.process_index() == self.ranks[-1]


@pytest.fixture(scope="module")
def saved_state(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("take_over") / "checkpoint")
    small_cluster.run(save, path)
    return path


@pytest.fixture(scope="module")
def saved_large_state(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("slow_host") / "checkpoint")
    small_cluster.run(save, path, LARGE_STATE)
    return path


STEPS = {"first": 0, "later": 1, "last": -1}
NOTHING = {"nothing": None}
SPREAD = NOTHING | {
    f"{kind} at {step}": Trouble((1 + number,), kind, first, 1 if kind == "delay" else 1000)
    for kind in ("delay", "stall", "error")
    for number, (step, first) in enumerate(STEPS.items())
}
SPREAD_MORE = NOTHING | {
    "stall once": Trouble((3,), "stall", 1, 1),
    "stall of process 0": Trouble((0,), "stall", 1),
    "stall of two": Trouble((0, 3), "stall", 1),
    "stall of three": Trouble((1, 2, 3), "stall", 1),
    "error on two": Trouble((0, 2), "error", 1, 1),
}
SINGLE_ALL = {
    f"{kind} at {step}": Trouble((0,), kind, first, 1 if kind == "delay" else 1000)
    for kind in ("delay", "stall", "error")
    for step, first in STEPS.items()
}
SINGLE = NOTHING | {name: SINGLE_ALL.pop(name) for name in ("stall at later", "error at last")}
SINGLE_MORE = NOTHING | SINGLE_ALL
# Which groups a process reads how depends on what `auto` measures: "both" counts all of them.
AUTO = NOTHING | {
    "stall of all": Trouble((1,), "stall", 0, end="both"),
    "error later": Trouble((2,), "error", 1, end="both"),
}
AUTO_MORE = NOTHING | {
    "delay at first": Trouble((3,), "delay", 0, 1),
    "delay later": Trouble((2,), "delay", 1, 1, end="both"),
    "stall at first": Trouble((2,), "stall", 0),
    "stall later": Trouble((0,), "stall", 1, end="both"),
    "error at first": Trouble((1,), "error", 0),
    "delay of direct reads": Trouble((1,), "delay", 0, 1, end="read_whole"),
    "stall of direct reads": Trouble((2,), "stall", 0, end="read_whole"),
    "error of direct reads": Trouble((3,), "error", 0, end="read_whole"),
}
# In each replica a process can't read, and no block is lost.
SPREAD_WIDE = NOTHING | {
    "error in both replicas": Trouble((0, 3), "error", 1),
    "stall in both replicas": Trouble((1, 2), "stall", 0),
    "recovery of one of two that hold the same": Trouble((1, 3), "recovery", 1),
}
SINGLE_WIDE = NOTHING | {
    "error of the reader and of the next one": Trouble((1, 2), "error", 0),
    "stall of the reader and of the next one": Trouble((0, 3), "stall", 0),
}
AUTO_WIDE = NOTHING | {
    "error in both replicas": Trouble((0, 3), "error", 0, end="both"),
    "error of direct reads in both replicas": Trouble((1, 2), "error", 0, end="read_whole"),
    "stall in both replicas": Trouble((1, 2), "stall", 1, end="both"),
}
AUTO_COPIES = NOTHING | {
    "error on one of each two that hold the same": Trouble((0, 3), "error", 0, end="both"),
    "stall on one of each two that hold the same": Trouble((1, 2), "stall", 0, end="both"),
}
CASES = {
    "spread": ("spread", SPREAD, MESH),
    "spread, more": ("spread", SPREAD_MORE, MESH),
    "spread, wide": ("spread", SPREAD_WIDE, WIDE),
    "single": ("single", SINGLE, MESH),
    "single, more": ("single", SINGLE_MORE, MESH),
    "single, wide": ("single", SINGLE_WIDE, WIDE),
    "auto": ("auto", AUTO, MESH),
    "auto, more": ("auto", AUTO_MORE, MESH),
    "auto, wide": ("auto", AUTO_WIDE, WIDE),
    "auto, wide, copies": ("auto", AUTO_COPIES, COPIES),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.once if "more" in case or "copies" in case else ()) for case in CASES]
)
def test_others_read_in_place_of_a_reader(small_cluster: lab.Cluster, saved_state: str, case: str) -> None:
    strategy, scenarios, mesh = CASES[case]
    results = small_cluster.run(restore_in, saved_state, strategy, scenarios, mesh, timeout=600)
    found = [take_overs for take_overs, _ in results]
    assert found == [found[0]] * 4  # all processes know the same
    for name, trouble in scenarios.items():
        if trouble is None:
            assert not found[0][name]
            continue
        if trouble.kind == "delay":  # others may need as long on a busy machine
            # Whether a process reads more than once depends on how fast the others are.
            assert trouble.first or all(results[rank][1][name] for rank in trouble.ranks), (
                f"nothing was delayed: {name}"
            )
        else:
            expected = "OSError: the disk is gone" if trouble.kind == "error" else "late"
            taken_over = {(process, why) for _, process, why in found[0][name]}  # others may be late, too
            assert {(rank, expected) for rank in trouble.taken_over} <= taken_over, name


@pytest.mark.parametrize(
    "strategy", ["spread", *(pytest.param(other, marks=pytest.mark.once) for other in ("single", "auto"))]
)
def test_nobody_takes_over_leaves_that_never_travel(
    small_cluster: lab.Cluster, saved_state: str, strategy: str
) -> None:
    delayed = {"delay": Trouble((2,), "delay", 0, 1, end="read_direct")}
    small_cluster.run(restore_in, saved_state, strategy, delayed, MESH)
    for kind, error in (("error", "RestoreFailedError"), ("stall", "RestoreTimeoutError")):
        trouble = Trouble((2,), kind, end="read_direct")
        for message in small_cluster.run(failure_in, saved_state, strategy, trouble):
            assert message.startswith(f"{error}: ")
            assert "process 2" in message
            assert "the disk is gone" in message or kind != "error"


@pytest.mark.once
def test_a_late_process_may_not_have_compiled_what_it_takes_part_in(
    small_cluster: lab.Cluster, saved_state: str
) -> None:
    found = small_cluster.run(restore_with_slow_compiler, saved_state, 2)
    assert found == [found[0]] * 4
    assert (2, "late") in found[0]


@pytest.mark.once
def test_the_error_names_all_who_have_tried(small_cluster: lab.Cluster, saved_state: str) -> None:
    troubles = Trouble((0,), "error"), Trouble((1, 2, 3), "stall")
    for message in small_cluster.run(failure_in, saved_state, "single", *troubles):
        assert message.startswith("RestoreTimeoutError: ")
        assert "OSError: the disk is gone" in message
        for process in range(4):
            assert f"process {process} (" in message


@pytest.mark.once
@pytest.mark.parametrize(("strategy", "slow"), [("single", 0), ("spread", 2)])
def test_a_slow_host_is_dealt_less(
    small_cluster: lab.Cluster, saved_large_state: str, strategy: str, slow: int
) -> None:
    planned = small_cluster.run(restore_with_slow_host, saved_large_state, strategy, None)[0]
    useful = small_cluster.run(restore_with_slow_host, saved_large_state, strategy, slow)[0]
    assert useful[slow] < 0.8 * planned[slow]
    if strategy == "single":
        assert max(count for process, count in enumerate(useful) if process != slow) > MIB


# Run on the processes.


def save(path: str, specs: Mapping[str, Spec] = STATE) -> None:
    state = states.make_state(specs, MESH.make())
    save_args = {name: ocp.SaveArgs(chunk_byte_size=64 << 10 if "cut" in name else None) for name in specs}
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state, save_args=save_args))


def restore_in(
    path: str, strategy: str, scenarios: Mapping[str, Trouble | None], mesh: MeshSpec
) -> tuple[dict[str, list[tuple[int, int, str]]], dict[str, int]]:
    """Restores exactly in each scenario.

    Returns by scenario the take-overs (group, process, why), and how many reads of this process had a trouble.
    """
    found, hit = {}, {}
    for name, trouble in scenarios.items():
        with troubled(strategy, trouble) as troubles:
            knobs = {
                "strategy": strategy,
                "replica_axis": "dp",
                "broadcast_memory_limit_bytes": 12 * MIB,
                # An error is reported at once. Who was late before is dealt less, and may not come to its error.
                "late_seconds": 0.5 if trouble and trouble.kind != "error" else 30.0,
                "stall_timeout": stall_timeout(trouble),
            }
            with states.logged() as lines:
                report = states.restore_exactly(path, knobs, STATE, mesh)
        told = [line for line in lines if "the other replicas read group" in line]
        for one in report.take_overs:
            assert any(f"in place of process {one.process} (" in line and line.endswith(one.why) for line in told), told
        found[name] = [(one.group, one.process, one.why) for one in report.take_overs]
        hit[name] = len(troubles)
    return found, hit


def stall_timeout(trouble: Trouble | None) -> float:
    """Returns a limit that ends no restore, but has those be asked soon who are late together."""
    if trouble is not None and trouble.kind == "recovery":
        return 60.0
    return 12.0 if trouble and len(trouble.ranks) > 2 else 300.0


def restore_with_slow_host(path: str, strategy: str, slow: int | None) -> list[int]:
    """Restores with one host that reads slowly, on which nobody gives up; returns the bytes that each process needed.

    Without a slow host, nothing is dealt again.
    """
    original = Executor.read

    async def read(self: Executor, group: Any, *held: Any) -> Any:
        await asyncio.sleep(self.share_bytes(group) / SLOW_RATE if jax.process_index() == slow else 0)
        return await original(self, group, *held)

    knobs = {
        "strategy": strategy,
        "replica_axis": "dp",
        "broadcast_memory_limit_bytes": 6 * MIB,
        "late_seconds": math.inf,
    }
    with mock.patch.object(Executor, "read", read), dealt_as_planned() if slow is None else contextlib.nullcontext():
        report = states.restore_exactly(path, knobs, LARGE_STATE, MESH)
    members = [report.members[process] for process in sorted(report.members)]
    return [member.bytes_read - member.bytes_again for member in members]


def restore_with_slow_compiler(path: str, slow: int) -> list[tuple[int, str]]:
    """Restores with nothing compiled, and one process that reads late and compiles later; returns who was late."""
    collectives.exchange_among.cache_clear()
    original, note = Executor.compile, Recorder.took_over
    taken_over = threading.Event()

    async def compile(self: Executor, groups: Any) -> None:
        if jax.process_index() == slow:
            await asyncio.to_thread(taken_over.wait, 60)
        await original(self, groups)

    def note_and_tell(*args: Any) -> None:
        note(*args)
        taken_over.set()

    knobs = {"strategy": "spread", "replica_axis": "dp", "late_seconds": 0.5}
    noted = mock.patch.object(Recorder, "took_over", note_and_tell)
    with noted, mock.patch.object(Executor, "compile", compile), troubled("spread", Trouble((slow,), "stall", 0, 1)):
        report = states.restore_exactly(path, knobs, STATE, MESH)
    return [(one.process, one.why) for one in report.take_overs]


def dealt_as_planned() -> contextlib.AbstractContextManager[Any]:
    """Has groups be dealt again only if a process is stuck: on a busy machine, any is slow for a moment."""
    return mock.patch.object(own_reads, "_LONG_ENOUGH", math.inf)


def failure_in(path: str, strategy: str, *troubles: Trouble) -> str:
    """Returns the error of a restore that can't succeed. No process has two of the troubles."""
    knobs = {"strategy": strategy, "replica_axis": "dp", "late_seconds": 0.5, "stall_timeout": 6.0}
    here = [trouble for trouble in troubles if jax.process_index() in trouble.ranks]
    with troubled(strategy, here[0] if here else None), pytest.raises(orbax_ext.RestoreError) as caught:
        states.restore(path, STATE, MESH, knobs=knobs)
    return f"{caught.type.__name__}: {caught.value}"


_shares: dict[str, int] = {}  # that this process reads where nothing goes wrong, by strategy


@contextlib.contextmanager
def troubled(strategy: str, trouble: Trouble | None) -> Iterator[list[str]]:
    """Has the reads of this process be late, stall or fail, if it has a trouble; yields a list of those that do."""
    trouble = Trouble((), "none") if trouble is None else trouble.here
    first = trouble.first if trouble.first >= 0 else _shares[strategy] + trouble.first
    reads = 0
    hit: list[str] = []

    def replaced(name: str) -> contextlib.AbstractContextManager[Any]:
        original = getattr(Executor, name)

        async def read(self: Executor, group: Any, *held: Any) -> Any:
            nonlocal reads
            if name == "read" and not self.share_bytes(group):
                return await original(self, group, *held)
            reads += 1
            if first < reads <= first + trouble.count and trouble.kind != "none":
                hit.append(name)
                if trouble.kind == "error":
                    raise OSError("the disk is gone")
                await asyncio.sleep(trouble.seconds)
            return await original(self, group, *held)

        return mock.patch.object(Executor, name, read)

    with contextlib.ExitStack() as stack:
        stack.enter_context(dealt_as_planned())
        for name in ("read", "read_whole") if trouble.end == "both" else (trouble.end,):
            stack.enter_context(replaced(name))
        if trouble.end == "read_whole":
            stack.enter_context(exchanges_after_direct_reads())
        yield hit
    _shares.setdefault(strategy, reads)


@contextlib.contextmanager
def exchanges_after_direct_reads() -> Iterator[None]:
    """Has exchanges wait until this process reads a group directly: however fast they are, `auto` does so."""
    begun = threading.Event()
    run, read_whole = Executor._run, Executor.read_whole

    def run_later(*args: Any) -> Any:
        begun.wait(60)
        return run(*args)

    async def read(*args: Any) -> Any:
        begun.set()
        return await read_whole(*args)

    with mock.patch.object(Executor, "_run", run_later), mock.patch.object(Executor, "read_whole", read):
        yield
