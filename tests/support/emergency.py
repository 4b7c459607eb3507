"""Orbax's emergency manager: saves and restores through it, and the loss of hosts. Run on the processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
from absl import flags
from jax.sharding import Mesh
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency
from orbax.checkpoint.path import step as step_lib

import orbax_ext
from orbax_ext.meeting.session import Session
from orbax_ext.report.report import publish
from orbax_ext.storage.checkpoint import digest_files
from orbax_ext.transfer.collectives import Exchange
from orbax_ext.transfer.local_pipeline import LocalPipeline
from orbax_ext.transfer.relays import RelayExecutor
from tests.support import fault_injection, states
from tests.support.states import MeshSpec, P, Spec

HANGING = 120.0  # seconds, longer than any restore waits

ONE_HOST = MeshSpec((4, 2), ("dp", "tp"))  # 4 processes x 2 devices: a replica is one process
TWO_HOSTS = MeshSpec((2, 4), ("dp", "tp"))  # a replica spans two processes
SWAPPED_REPLICAS = MeshSpec((2, 4), ("dp", "tp"), devices=(4, 5, 6, 7, 0, 1, 2, 3))  # the other replica is the primary
SWAPPED_HOSTS = MeshSpec((2, 4), ("dp", "tp"), devices=(0, 1, 2, 3, 6, 7, 4, 5))  # the last two hosts change places
EACH_ITS_OWN = MeshSpec((2, 4), ("dp", "tp"), devices=(0, 2, 4, 6, 1, 3, 5, 7))  # all devices of a host need the same

STATE = {
    "weights": Spec((64, 128), "bfloat16", P("tp")),
    "embedding": Spec((16, 64), "float32", P(None, "tp")),
    "bias": Spec((24,), "float32"),
    "quantized": Spec((8, 16), "int8", P("tp", None)),
    "mask": Spec((32,), "bool"),
    "step": Spec((), "int32"),
    # Too large to be packed.
    "layer_0": Spec((512, 512), "float32", P("tp")),
    "layer_1": Spec((512, 512), "bfloat16", P("tp")),
    "replicated": Spec((64, 1024), "float32"),
}

WIDE = ("int64", "uint64", "float64", "complex128")
_DTYPES = (
    *("bool", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"),
    *("complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", *WIDE),
)
EVERY_DTYPE = {
    f"{dtype}_{name}": Spec(shape, dtype, spec)
    for dtype in _DTYPES
    for name, shape, spec in [("matrix", (16, 6), P("tp")), ("scalar", (), P()), ("layer", (512, 512), P("tp"))]
    # Plain Orbax, too, changes NaNs in a layer of float8_e5m2 (JAX 0.12.0.1).
    if (dtype, name) != ("float8_e5m2", "layer")
}


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restore on one process."""

    differences: list[str]
    error: str = ""  # type and message
    lines: tuple[str, ...] = ()  # that were logged
    strategy: Mapping[str, str] = dataclasses.field(default_factory=dict)
    received: int = 0  # bytes from other processes, by the report
    collectives: int = 0  # that this process has entered
    read: int = 0  # bytes, by the report


def save(
    root: str,
    specs: Mapping[str, Spec],
    mesh: MeshSpec,
    *,
    steps: tuple[int, ...] = (1,),
    persistent_every: int = 1,
    persistent: str = "persistent",
) -> None:
    """Saves steps: the primary replica to persistent storage, all others each to the directory of their host.

    No two steps have the same bytes.
    """
    made = mesh.make()
    with (
        wide_types(specs),
        manager(root, specs, made, persistent_every=persistent_every, persistent=persistent) as running,
    ):
        for step in steps:
            state = states.make_state(specs, made, _first_seed(step))
            running.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        running.wait_until_finished()


def restore(
    root: str,
    specs: Mapping[str, Spec],
    mesh: MeshSpec,
    step: int | None = 1,
    *,
    implementation: str = "ours",
    context: str = "none",
    knobs: Mapping[str, Any] | None = None,
    fault: tuple[int, str] = (0, "none"),
    times: int = 1,
    manager_first: bool = False,
    expected: int | None = None,
) -> Restored:
    """Restores a step through a manager that is made in the caller's mesh scope; returns what differs.

    Step None leaves the choice to the manager: then it is compared with the step `expected`. `fault` is a process and
    one of `FAULTS`; `manager_first` makes the manager before orbax_ext is registered.
    """
    made = mesh.make()
    publish(None)
    registered = orbax_ext.registered(**{"progress": False, "stall_timeout": 20.0, **(knobs or {})})
    with wide_types(specs):
        with contextlib.ExitStack() as stack, states.logged() as lines, counted_collectives() as collectives:
            try:
                if not manager_first:
                    stack.enter_context(states.in_context(context, made))
                    stack.enter_context(registered if implementation == "ours" else contextlib.nullcontext())
                running = stack.enter_context(manager(root, specs, made))
                if manager_first:
                    stack.enter_context(states.in_context(context, made))
                    stack.enter_context(registered)
                rank, kind = fault
                for number in range(times):
                    with fault_injection.on(rank, FAULTS[kind] if number == 0 else contextlib.nullcontext):
                        restored = running.restore(step).state
                        jax.block_until_ready(restored)
            except Exception as error:
                return Restored([], f"{type(error).__name__}: {error}", tuple(lines))
        report = orbax_ext.last_report()
        different = states.differences(restored, specs, made, _first_seed(expected or step or 1))
    if report is None:
        return Restored(different, "", tuple(lines))
    own = report.own
    return Restored(different, "", tuple(lines), report.strategy, own.bytes_received, len(collectives), own.bytes_read)


def _first_seed(step: int) -> int:
    return 1000 * (step - 1)


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Collects the names of the functions through which this process enters collectives of orbax_ext."""
    entered: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Exchange, name)

        def entering(*args: Any, **kwargs: Any) -> Any:
            entered.append(name)
            return original(*args, **kwargs)

        return entering

    with contextlib.ExitStack() as stack:
        for name in ("_start", "connect_moves"):
            stack.enter_context(mock.patch.object(Exchange, name, counting(name)))
        yield entered


def restore_with_late_reader(
    root: str, specs: Mapping[str, Spec], mesh: MeshSpec, late: int
) -> tuple[Restored, float, float]:
    """Returns a restore, and when this process had loaded its first group and when it began to send it."""
    loaded, began = [], []
    load_group, start = LocalPipeline._load_group, RelayExecutor._start

    async def load_and_note(self: LocalPipeline, number: int) -> None:
        await load_group(self, number)
        loaded.append(time.monotonic())

    def note_and_start(self: RelayExecutor, *args: Any) -> Any:
        began.append(time.monotonic())
        return start(self, *args)

    with (
        mock.patch.object(LocalPipeline, "_load_group", load_and_note),
        mock.patch.object(RelayExecutor, "_start", note_and_start),
    ):
        restored = restore(root, specs, mesh, fault=(late, "late"))
    return restored, loaded[0], began[0]


def restore_older(root: str, specs: Mapping[str, Spec], mesh: MeshSpec, step: int, older: int) -> tuple[str, list[str]]:
    """Restores a step that is complete nowhere, then an older one; returns the error and what differs."""
    made, error = mesh.make(), ""
    with orbax_ext.registered(progress=False, stall_timeout=20.0), manager(root, specs, made) as running:
        try:
            running.restore(step)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        return error, states.differences(running.restore(older).state, specs, made, _first_seed(older))


def restore_with_phases(root: str, specs: Mapping[str, Spec], mesh: MeshSpec) -> tuple[Restored, list[str]]:
    """Returns a restore, and the meetings that it has held after all had arrived."""
    phases: list[str] = []
    meet = Session.meet

    def note_and_meet(self: Session, phase: str, *args: Any) -> Any:
        phases.append(phase)
        return meet(self, phase, *args)

    with mock.patch.object(Session, "meet", note_and_meet):
        return restore(root, specs, mesh), phases


@contextlib.contextmanager
def storage_fails(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` where this process looks for a step in persistent storage."""
    owner = type(step_lib.standard_name_format())
    original = owner.find_step

    def find_step(self: Any, base_path: Any, step: int) -> Any:
        if "persistent" in os.fspath(base_path):
            action()
        return original(self, base_path, step)

    with mock.patch.object(owner, "find_step", find_step):
        yield


def _refuse() -> None:
    raise OSError("no route to storage")


def listing_error() -> contextlib.AbstractContextManager[Any]:
    """Has the process fail to list its local steps."""
    return mock.patch.object(
        type(step_lib.standard_name_format()), "find_all", side_effect=OSError("the RAM disk is gone")
    )


@contextlib.contextmanager
def exception_in_exchange() -> Iterator[None]:
    """Has the process run out of memory when it prepares the first operand of an exchange."""
    original, failed = RelayExecutor._operand, False

    def fail_first(*args: Any) -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise MemoryError("no room for the exchange")
        return original(*args)

    with mock.patch.object(RelayExecutor, "_operand", fail_first):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "read error": fault_injection.read_error,
    "error while describing": fault_injection.error_while_describing,
    "listing error": listing_error,
    "exception in exchange": exception_in_exchange,
    "storage refuses": lambda: storage_fails(_refuse),
    "storage hangs": lambda: storage_fails(lambda: time.sleep(HANGING)),
    "late": fault_injection.slow_reads,
    "killed": lambda: fault_injection.signal_in_read(signal.SIGKILL),
}


def lose(root: str, *places: Any) -> None:
    """Removes the steps of hosts, by number, or of "persistent" storage."""
    for place in places:
        directory = pathlib.Path(root) / (place if isinstance(place, str) else f"host{place}")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()


def assert_exact(results: Sequence[Restored]) -> None:
    assert [result.error for result in results] == [""] * len(results)
    assert states.all_differences([result.differences for result in results]) == []


def restore_after_failure(
    root: str, specs: Mapping[str, Spec], mesh: MeshSpec, fault: tuple[int, str], knobs: Mapping[str, Any]
) -> tuple[str, Restored]:
    """Returns the error of a restore with a fault, and the restore after it."""
    failed = restore(root, specs, mesh, fault=fault, knobs=knobs)
    return failed.error, restore(root, specs, mesh)


def write_wrong_digest(state: str, leaf: str) -> None:
    """Writes digests beside a checkpoint of `STATE`, a wrong one for `leaf`."""
    records = {name: record for name, record in digest_files.compute(state) if isinstance(record, dict)}
    assert set(records) == set(STATE)
    records[leaf]["digest"] = "0" * 16
    digest_files.write(state, records)


@contextlib.contextmanager
def wide_types(specs: Mapping[str, Spec]) -> Iterator[None]:
    """Enables 64-bit types in this process if some leaf needs them."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", before or any(spec.dtype in WIDE for spec in specs.values()))
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextlib.contextmanager
def manager(
    root: str, specs: Mapping[str, Spec], mesh: Mesh, *, persistent_every: int = 1, persistent: str = "persistent"
) -> Any:
    """Returns an emergency manager, with a local directory for each process."""
    _initialize()
    directories = f"{root}/host{jax.process_index()}", f"{root}/{persistent}"
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=persistent_every, max_to_keep=2),
        replica_axis_index=mesh.axis_names.index("dp"),
    )
    made = emergency.CheckpointManager(*directories, mesh, states.abstract_state(specs, mesh), options=options)
    try:
        yield made
    finally:
        made.close()


@functools.cache
def _initialize() -> None:
    """Does what a program must have done before it makes an emergency manager, once in each process."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
