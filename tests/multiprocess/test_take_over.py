"""A reader that is late, stalls or fails is taken over by others, at every step of a restore."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest

from orbax_ext import lab
from orbax_ext.transfer.executor import Executor
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MIB = 1 << 20
MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {
    **{f"lane_{number}": Spec((512, 1024), "float32", P("tp")) for number in range(8)},  # whole, one for each replica
    **{f"cut_{number}": Spec((512, 2048), "bfloat16", P("tp")) for number in range(8)},  # cut among the replicas
    **{f"odd_{number}": Spec((3, 700_001), "float32") for number in range(1)},  # read by one replica
    **{f"small_{number}": Spec((64, 7 + number), "int8", P("tp")) for number in range(20)},
    "scalar": Spec((), "float32"),
}


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What goes wrong with the reads of some processes: from a read on, for some reads."""

    ranks: tuple[int, ...]
    kind: str  # "stall", "error"
    first: int = 0  # the first share with a trouble; -1 is the last one
    count: int = 1000
    end: str = "read"  # or "read_whole", for what `auto` reads directly, or "both"


@pytest.fixture(scope="module")
def saved_state(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("take_over") / "checkpoint")
    small_cluster.run(save, path)
    return path


SPREAD = {
    "nothing": ("spread", None),
    "stall at first": ("spread", Trouble((2,), "stall", 0)),
    "stall later": ("spread", Trouble((1,), "stall", 2)),
    "stall once": ("spread", Trouble((3,), "stall", 1, 1)),
    "stall of process 0": ("spread", Trouble((0,), "stall", 1)),
    "stall of two": ("spread", Trouble((0, 3), "stall", 1)),
    "stall at last": ("spread", Trouble((1,), "stall", -1)),
    "error at first": ("spread", Trouble((2,), "error", 0)),
    "error later": ("spread", Trouble((2,), "error", 1)),
    "error on two": ("spread", Trouble((0, 2), "error", 1, 1)),
}
SINGLE = {
    "nothing": ("single", None),
    "error": ("single", Trouble((0,), "error", 1)),
    "stall": ("single", Trouble((0,), "stall", 1)),
}
AUTO = {
    "nothing": ("auto", None),
    "stall at first": ("auto", Trouble((2,), "stall", 0)),
    "stall later": ("auto", Trouble((0,), "stall", 1)),
    "error at first": ("auto", Trouble((1,), "error", 0)),
    "stall of direct reads": ("auto", Trouble((2,), "stall", 0, end="read_whole")),
    "error of direct reads": ("auto", Trouble((3,), "error", 0, end="read_whole")),
    "stall of all": ("auto", Trouble((1,), "stall", 0, end="both")),
}


@pytest.mark.parametrize("scenarios", [SPREAD, SINGLE, AUTO], ids=["spread", "single", "auto"])
def test_others_read_in_place_of_a_reader(
    small_cluster: lab.Cluster, saved_state: str, scenarios: dict[str, tuple[str, Trouble | None]]
) -> None:
    found = small_cluster.run(restore_in, saved_state, scenarios)
    assert found == [found[0]] * 4  # all processes know the same
    for name, (_, trouble) in scenarios.items():
        if trouble is None:
            assert not found[0][name]
            continue
        # On a busy machine others may be late, too.
        why = "OSError: the disk is gone" if trouble.kind == "error" else "late"
        assert {(rank, why) for rank in trouble.ranks} <= {(process, why) for _, process, why in found[0][name]}, name


# Run on the processes.


def save(path: str) -> None:
    state = states.make_state(STATE, MESH.make())
    save_args = {name: ocp.SaveArgs(chunk_byte_size=64 << 10 if "cut" in name else None) for name in STATE}
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state, save_args=save_args))


def restore_in(path: str, scenarios: dict[str, tuple[str, Trouble | None]]) -> dict[str, list[tuple[int, int, str]]]:
    """Restores exactly in each scenario; returns the take-overs: group, process, why."""
    found = {}
    for name, (strategy, trouble) in scenarios.items():
        with troubled(trouble):
            knobs = {
                "strategy": strategy,
                "broadcast_memory_limit_bytes": 24 * MIB,
                "late_seconds": 0.5 if trouble else 30.0,
            }
            report = states.restore_exactly(path, knobs, STATE, MESH)
        found[name] = [(one.group, one.process, one.why) for one in report.take_overs]
    return found


_shares = 0  # that this process reads where nothing goes wrong


@contextlib.contextmanager
def troubled(trouble: Trouble | None) -> Iterator[None]:
    """Has the reads of this process stall or fail, if it has a trouble."""
    global _shares
    here = trouble is not None and jax.process_index() in trouble.ranks
    trouble = trouble if here and trouble is not None else Trouble((), "none")
    first = trouble.first if trouble.first >= 0 else _shares + trouble.first
    reads = 0

    def replaced(name: str) -> contextlib.AbstractContextManager[Any]:
        original = getattr(Executor, name)

        async def read(self: Executor, group: Any, *held: Any) -> Any:
            nonlocal reads
            if name == "read" and not self.share_bytes(group):
                return await original(self, group, *held)
            reads += 1
            if first < reads <= first + trouble.count:
                if trouble.kind == "error":
                    raise OSError("the disk is gone")
                if trouble.kind == "stall":
                    await asyncio.sleep(1000)
            return await original(self, group, *held)

        return mock.patch.object(Executor, name, read)

    with contextlib.ExitStack() as stack:
        for name in ("read", "read_whole") if trouble.end == "both" else (trouble.end,):
            stack.enter_context(replaced(name))
        yield
    _shares = _shares or reads
