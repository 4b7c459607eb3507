"""The faults, one function each, run on every process; the same for stock Orbax and for orbax_ext.

Each returns a `Record` of what came of the restore on this process, whatever it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

import orbax_ext
from orbax_ext.lab import handlers
from tests.support import injection, world
from tests.support.injection import on
from tests.support.world import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
# Integers of 32 bits: stock Orbax's broadcast does not change them, as it does some floating-point numbers.
STATE = {f"layer{number}": Spec((1024, 128), "int32", P("tp")) for number in range(6)}
STALL = 6.0  # seconds
READER = 1  # not process 0, whose death ends the coordination service and with it every process
OTHER = 2


@dataclasses.dataclass(frozen=True)
class Record:
    """What a restore came to on one process."""

    outcome: str  # "restored", "wrong data" or the name of an exception
    message: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0


def save(path: str, ocdbt: bool = True) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(world.make_state(STATE, MESH.make())))
        manager.wait_until_finished()


def restore(
    path: str,
    how: str,
    *,
    reader: int = READER,
    specs: Mapping[str, Spec] = STATE,
    times: int = 1,
    manager: ocp.CheckpointManager | None = None,
    **knobs: Any,
) -> Record:
    """One restore, or several; the last one counts."""
    started = time.monotonic()
    mesh = MESH.make()
    abstract = world.abstract_state(specs, mesh)
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract, strict=False))
    every = {**world.knobs_for(how, MESH, "dp"), "primary_replica_id": reader, **knobs}
    every |= {"stall_timeout": STALL} if how == "ours" else {}
    try:
        with handlers.registered(how, **every):
            manager = manager or ocp.CheckpointManager(path)  # not closed: that is a collective step too
            for _ in range(times):
                started = time.monotonic()
                restored = jax.block_until_ready(manager.restore(0, args=args))
    except BaseException as error:
        return Record(type(error).__name__, str(error), time.monotonic() - started, injection.rss_megabytes())
    wrong = world.differences(restored, specs, mesh)
    outcome = "wrong data" if wrong else "restored"
    return Record(outcome, "; ".join(wrong), time.monotonic() - started, injection.rss_megabytes())


def healthy(path: str, how: str) -> Record:
    return restore(path, how)


def read_error(path: str, how: str) -> Record:
    with on(READER, injection.read_error):
        return restore(path, how)


def permission_denied(path: str, how: str) -> Record:
    with on(READER, injection.as_nobody):
        return restore(path, how)


def reader_stopped(path: str, how: str) -> Record:
    with on(READER, lambda: injection.signal_in_read(signal.SIGSTOP)):
        record = restore(path, how)
    end_mark(path, how, jax.process_index()).touch()
    return record


def end_mark(path: str, how: str, rank: int) -> pathlib.Path:
    """The file that a process makes when its restore has ended while the reader is stopped."""
    return pathlib.Path(f"{path}.{how}.{rank}.ended")


def reader_slow(path: str, how: str) -> Record:
    with on(READER, lambda: injection.slow_but_advancing(STALL / 2)):
        return restore(path, how)


def reader_killed(path: str, how: str) -> Record:
    with on(READER, lambda: injection.signal_in_read(signal.SIGKILL)):
        return restore(path, how)


def non_reader_killed(path: str, how: str) -> Record:
    return _killed(path, how, OTHER)


def process_0_killed(path: str, how: str) -> Record:
    return _killed(path, how, 0)


def _killed(path: str, how: str, rank: int) -> Record:
    """A process is killed while the reader reads."""
    begun = pathlib.Path(f"{path}.{how}.{rank}.reading")
    with (
        on(READER, lambda: injection.slow_read(begun)),
        on(rank, lambda: injection.signal_once(begun, signal.SIGKILL)),
    ):
        return restore(path, how)


def never_calls(path: str, how: str) -> Record:
    if jax.process_index() == OTHER:
        ocp.CheckpointManager(path)  # which the others wait for
        return Record("not called")
    return restore(path, how)


def another_tree(path: str, how: str) -> Record:
    odd = jax.process_index() == OTHER
    return restore(path, how, specs={**STATE, "layer3": Spec((64, 128), "int32", P("tp"))} if odd else STATE)


def other_options(path: str, how: str) -> Record:
    return restore(path, how, reader=3 if jax.process_index() == OTHER else READER)


def calls_twice(path: str, how: str) -> Record:
    return restore(path, how, times=2 if jax.process_index() == OTHER else 1)


def exception_in_exchange(path: str, how: str) -> Record:
    with on(OTHER, lambda: injection.exception_in_exchange(how)):
        return restore(path, how)


def killed_while_connecting(path: str, how: str) -> Record:
    with on(OTHER, lambda: injection.killed_before_collective(how, 1)):
        return restore(path, how)


def killed_in_exchange(path: str, how: str) -> Record:
    with on(OTHER, lambda: injection.killed_before_collective(how, 2)):
        return restore(path, how)


def interrupted(path: str, how: str) -> Record:
    with on(READER, lambda: injection.signal_in_read(signal.SIGINT)):
        return restore(path, how)


def verified(path: str, how: str) -> Record:
    knobs: dict[str, Any] = {"verify": True} if how == "ours" else {}
    return restore(path, how, **knobs)


# The soak.

SOAK_STATE = {"layer0": Spec((64, 64), "float32", P("tp")), "bias": Spec((8,), "bfloat16")}
SOAK_FAULTS = ("none", "none", "none", "read error", "another tree", "exchange", "other options", "late")


def soak(path: str, plan: list[tuple[str, int]]) -> list[Record]:
    """One restore after the other, each with a fault on a process (or none) that the plan tells."""
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
            stack.enter_context(on(READER, injection.read_error))
        if fault == "exchange":
            stack.enter_context(on(rank, lambda: injection.exception_in_exchange("ours")))
        return restore(path, "ours", specs=specs, reader=reader, manager=manager)


def save_soak(path: str) -> None:
    world.save(path, SOAK_STATE, MESH)


def coordination_keys() -> list[str]:
    from orbax_ext.upstream.runtime import coordination_client

    return [key for key, _ in coordination_client().key_value_dir_get("orbax_ext/")]
