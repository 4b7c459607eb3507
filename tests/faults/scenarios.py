"""The faults, one function each, for stock Orbax and for orbax_ext. Run on the processes.

Each function returns a `Record` of the restore on its process, however the restore ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

import orbax_ext
from orbax_ext.lab import handlers
from tests.support import fault_injection, states
from tests.support.fault_injection import on
from tests.support.states import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
# 32-bit integers, because stock Orbax's broadcast changes some floating-point numbers.
STATE = {f"layer{number}": Spec((1024, 128), "int32", P("tp")) for number in range(6)}
STALL = 6.0  # seconds
READER = 1  # not process 0: its death ends the coordination service, and then every process
OTHER = 2


@dataclasses.dataclass(frozen=True)
class Record:
    """The result of a restore on one process."""

    outcome: str  # "restored", "wrong data" or the name of an exception
    message: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0


def save(path: str, ocdbt: bool = True) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(states.make_state(STATE, MESH.make())))
        manager.wait_until_finished()


def restore(
    path: str,
    implementation: str,
    *,
    reader: int = READER,
    specs: Mapping[str, Spec] = STATE,
    times: int = 1,
    manager: ocp.CheckpointManager | None = None,
    **knobs: Any,
) -> Record:
    """Restores once or several `times`, and records the last restore."""
    started = time.monotonic()
    mesh = MESH.make()
    abstract = states.abstract_state(specs, mesh)
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract, strict=False))
    all_knobs = {**states.knobs_for(implementation, MESH, "dp"), "primary_replica_id": reader, **knobs}
    all_knobs |= {"stall_timeout": STALL} if implementation == "ours" else {}
    try:
        with handlers.registered(implementation, **all_knobs):
            manager = manager or ocp.CheckpointManager(path)  # not closed: closing waits for all processes, too
            for _ in range(times):
                started = time.monotonic()
                restored = jax.block_until_ready(manager.restore(0, args=args))
    except BaseException as error:
        return Record(type(error).__name__, str(error), time.monotonic() - started, _rss_megabytes())
    wrong = states.differences(restored, specs, mesh)
    outcome = "wrong data" if wrong else "restored"
    return Record(outcome, "; ".join(wrong), time.monotonic() - started, _rss_megabytes())


def _rss_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def healthy(path: str, implementation: str) -> Record:
    return restore(path, implementation)


def read_error(path: str, implementation: str) -> Record:
    with on(READER, fault_injection.read_error):
        return restore(path, implementation)


def strict_read_error(path: str, implementation: str) -> Record:
    knobs: Any = {"strict_readers": True} if implementation == "ours" else {}
    with on(READER, fault_injection.read_error):
        return restore(path, implementation, **knobs)


def reader_stalled(path: str, implementation: str) -> Record:
    knobs: Any = {"late_seconds": 0.3} if implementation == "ours" else {}  # asked long before STALL
    with on(READER, lambda: fault_injection.slow_reads(1000)):
        return restore(path, implementation, **knobs)


def permission_denied(path: str, implementation: str) -> Record:
    with on(READER, fault_injection.as_nobody):
        return restore(path, implementation)


def reader_stopped(path: str, implementation: str) -> Record:
    with on(READER, lambda: fault_injection.signal_in_read(signal.SIGSTOP)):
        record = restore(path, implementation)
    end_mark(path, implementation, jax.process_index()).touch()
    return record


def end_mark(path: str, implementation: str, rank: int) -> pathlib.Path:
    """Returns the file that a process creates when its restore has ended while the reader is stopped."""
    return pathlib.Path(f"{path}.{implementation}.{rank}.ended")


def reader_slow(path: str, implementation: str) -> Record:
    with on(READER, lambda: fault_injection.slow_but_advancing(STALL / 2)):
        return restore(path, implementation)


def reader_killed(path: str, implementation: str) -> Record:
    with on(READER, lambda: fault_injection.signal_in_read(signal.SIGKILL)):
        return restore(path, implementation)


def non_reader_killed(path: str, implementation: str) -> Record:
    return _killed(path, implementation, OTHER)


def process_0_killed(path: str, implementation: str) -> Record:
    return _killed(path, implementation, 0)


def _killed(path: str, implementation: str, rank: int) -> Record:
    """Kills a process while the reader reads."""
    begun, connected, killed = (
        pathlib.Path(f"{path}.{implementation}.{rank}.{what}") for what in ("reading", "connected", "killed")
    )
    ours = implementation == "ours"
    knobs: Any = {"late_seconds": math.inf} if ours else {}  # else others read in place of the slow reader
    with (
        fault_injection.noting_connection(connected),
        on(READER, lambda: fault_injection.slow_reads(begun=begun, until=killed if ours else None)),
        on(rank, lambda: fault_injection.killed_once(begun, connected if ours else None, killed)),
    ):
        return restore(path, implementation, **knobs)


def never_calls(path: str, implementation: str) -> Record:
    if jax.process_index() == OTHER:
        ocp.CheckpointManager(path)  # the other processes wait for it
        return Record("not called")
    return restore(path, implementation)


def another_tree(path: str, implementation: str) -> Record:
    specs = {**STATE, "layer3": Spec((64, 128), "int32", P("tp"))} if jax.process_index() == OTHER else STATE
    return restore(path, implementation, specs=specs)


def other_options(path: str, implementation: str) -> Record:
    return restore(path, implementation, reader=3 if jax.process_index() == OTHER else READER)


def calls_twice(path: str, implementation: str) -> Record:
    return restore(path, implementation, times=2 if jax.process_index() == OTHER else 1)


def exception_in_exchange(path: str, implementation: str) -> Record:
    with on(OTHER, lambda: fault_injection.exception_in_exchange(implementation)):
        return restore(path, implementation)


def killed_while_connecting(path: str, implementation: str) -> Record:
    with on(OTHER, lambda: fault_injection.killed_before_collective(implementation, 1)):
        return restore(path, implementation)


def killed_in_exchange(path: str, implementation: str) -> Record:
    with on(OTHER, lambda: fault_injection.killed_before_collective(implementation, 2)):
        return restore(path, implementation)


def interrupted(path: str, implementation: str) -> Record:
    with on(READER, lambda: fault_injection.signal_in_read(signal.SIGINT)):
        return restore(path, implementation)


def verified(path: str, implementation: str) -> Record:
    knobs: dict[str, Any] = {"verify": True} if implementation == "ours" else {}
    return restore(path, implementation, **knobs)


# The soak test.

SOAK_STATE = {"layer0": Spec((64, 64), "float32", P("tp")), "bias": Spec((8,), "bfloat16")}
SOAK_FAULTS = ("none", "none", "none", "read error", "another tree", "exchange", "other options", "late")


def soak(path: str, plan: list[tuple[str, int]]) -> list[Record]:
    """Restores once for each (fault, process) of the plan."""
    manager = ocp.CheckpointManager(path)
    return [_soak_once(path, manager, fault, rank) for fault, rank in plan]


def _soak_once(path: str, manager: ocp.CheckpointManager, fault: str, rank: int) -> Record:
    here = jax.process_index() == rank
    specs = {**SOAK_STATE, "bias": Spec((4,), "bfloat16")} if here and fault == "another tree" else SOAK_STATE
    reader = 2 if here and fault == "other options" else READER
    if here and fault == "late":
        time.sleep(0.3)
    with contextlib.ExitStack() as stack:
        if fault == "read error":
            stack.enter_context(on(READER, fault_injection.read_error))
        if fault == "exchange":
            stack.enter_context(on(rank, lambda: fault_injection.exception_in_exchange("ours")))
        return restore(path, "ours", specs=specs, reader=reader, manager=manager)


def save_soak(path: str) -> None:
    states.save(path, SOAK_STATE, MESH)
