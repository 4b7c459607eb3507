"""Restores that are begun early: what the processes run, and what they find."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import gc
import io
import runpy
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from jax._src.interpreters import pxla
from jax.experimental import multihost_utils
from orbax.checkpoint._src.multihost import multihost

import orbax_ext
from orbax_ext.meeting.session import Session
from orbax_ext.report import collect
from orbax_ext.storage import counters
from orbax_ext.transfer import boxes
from orbax_ext.transfer.collectives import Exchange
from orbax_ext.transfer.executor import Executor
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {
    **{f"layer_{number}": Spec((1024, 1024), "float32", P("tp")) for number in range(8)},
    **{f"sharded_{number}": Spec((1024, 256), "bfloat16", P(("dp", "tp"))) for number in range(3)},  # read directly
    **{f"bias_{number}": Spec((24 + number,), "float32") for number in range(40)},
    "mask": Spec((32,), "bool"),
    "step": Spec((), "int32"),
}
FIRST = (0, 100)  # seed of the first leaf, for each step
SHARE = 8 * (4 << 20) // 4 + 3 * (1 << 19) // 4  # bytes that a process reads of the large leaves
SMALL = 64 << 10  # bytes: more than all metadata and small leaves together, less than a share of one layer
GROUPS: dict[str, Any] = {"broadcast_memory_limit_bytes": 24 << 20}  # several groups
PATIENCE = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Restored:
    """What one process found."""

    differences: list[str]
    ahead: int  # bytes that were held before `result`
    read: int  # bytes that were read in `result`
    strategy: frozenset[str] = frozenset()
    left: tuple[str, ...] = ()  # threads that are left


def save(path: str) -> None:
    """Saves the state as step 0, with other values as step 1, as a composite, and for the v1 API."""
    state = states.make_state(STATE, MESH.make())
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.save(1, args=ocp.args.PyTreeSave(states.make_state(STATE, MESH.make(), FIRST[1])))
        manager.wait_until_finished()
    with ocp.CheckpointManager(f"{path}/composite") as manager:
        items = {"params": ocp.args.StandardSave(state), "notes": ocp.args.JsonSave({"epoch": 3})}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    getattr(ocp_v1, "save", ocp_v1.save_pytree)(f"{path}/v1", state)


def abstract() -> dict[str, jax.ShapeDtypeStruct]:
    return states.abstract_state(STATE, MESH.make())


def pytree_args() -> Any:
    return ocp.args.PyTreeRestore(abstract(), restore_args=orbax_ext.restore_args(abstract()))


def differences(state: Any, step: int = 0) -> list[str]:
    return states.differences(state, STATE, MESH.make(), FIRST[step])


@contextlib.contextmanager
def nothing_but_reading() -> Iterator[None]:
    """Fails whoever runs a program, puts something onto a device, meets other processes or enters a barrier of Orbax.

    An attempt counts even if its error is caught: programs are compiled in a thread that ignores errors.
    """
    attempts: list[str] = []

    def forbidden(name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            attempts.append("".join([f"{name}\n", *traceback.format_stack(limit=8)]))
            raise AssertionError(f"{name} must wait for result()")

        return fail

    targets = [
        (jax, "device_put"),
        (jax, "make_array_from_single_device_arrays"),
        (jax, "make_array_from_callback"),
        (pxla.ExecuteReplicated, "__call__"),  # any program
        (Exchange, "_start"),
        (Session, "arrive"),
        (multihost, "sync_global_processes"),
        (multihost, "broadcast_one_to_all"),
        *((multihost_utils, name) for name in ("broadcast_one_to_all", "process_allgather", "sync_global_devices")),
    ]
    jax.clear_caches()  # a jitted function that has run before would not pass through Python
    with contextlib.ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(mock.patch.object(owner, name, forbidden(name)))
        yield
    assert attempts == []


@contextlib.contextmanager
def nothing_but_reading_from_the_start(stack: contextlib.ExitStack) -> Iterator[None]:
    """Enters `nothing_but_reading` on a stack at the moment at which a restore is begun."""

    def guarded(begin: Any) -> Any:
        def begin_guarded(*args: Any, **kwargs: Any) -> Any:
            stack.enter_context(nothing_but_reading())
            return begin(*args, **kwargs)

        return begin_guarded

    with (
        mock.patch.object(orbax_ext, "restore_async", guarded(orbax_ext.restore_async)),
        mock.patch.object(orbax_ext.v1, "load_async", guarded(orbax_ext.v1.load_async)),
    ):
        yield


def wait(pending: Any) -> int:
    """Waits until all is read ahead, also what others would send; returns the bytes of the share."""
    deadline = time.monotonic() + PATIENCE
    while not pending.done() or _reading():
        assert time.monotonic() < deadline, "reading ahead does not end"
        time.sleep(0.01)
    assert pending.exception() is None
    return int(pending.progress().done)


def _reading() -> bool:
    return any(one.name.startswith("orbax_ext read") for one in threading.enumerate())


def threads(seconds: float = 5.0) -> list[str]:
    """Returns the names of our threads that do not end within a few seconds."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("orbax_ext")]
    for thread in ours:
        thread.join(seconds)
    return [thread.name for thread in ours if thread.is_alive()]


# The ways to begin a restore. Each takes the path and the arguments of `restore_async`, and returns the state's pending
# restore with what has to stay open until `result`.


@contextlib.contextmanager
def manager(path: str, **arguments: Any) -> Iterator[Any]:
    with ocp.CheckpointManager(f"{path}/manager") as made:
        yield orbax_ext.restore_async(made, 0, args=pytree_args(), **arguments)


@contextlib.contextmanager
def manager_registered(path: str, **arguments: Any) -> Iterator[Any]:
    with orbax_ext.registered(strategy="spread", **GROUPS), manager(path, **arguments) as pending:
        yield pending


@contextlib.contextmanager
def manager_registered_single(path: str, **arguments: Any) -> Iterator[Any]:
    with orbax_ext.registered(strategy="single", replica_axis="dp", **GROUPS), manager(path, **arguments) as pending:
        yield pending


@contextlib.contextmanager
def manager_with_stock_handler(path: str, **arguments: Any) -> Iterator[Any]:
    stock = ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=0)
    before = ocp.type_handlers.get_type_handler(jax.Array)
    with orbax_ext.registered(strategy="spread"):
        ocp.type_handlers.register_type_handler(jax.Array, stock, override=True)
        try:
            with manager(path, **arguments) as pending:
                yield pending
        finally:
            ocp.type_handlers.register_type_handler(jax.Array, before, override=True)


@contextlib.contextmanager
def own_handler(path: str, **arguments: Any) -> Iterator[Any]:
    handler = orbax_ext.pytree_handler(strategy="spread", **GROUPS)
    with ocp.CheckpointManager(f"{path}/manager", item_handlers=handler) as made:
        yield orbax_ext.restore_async(made, 0, args=pytree_args(), **arguments)


@contextlib.contextmanager
def latest_standard(path: str, **arguments: Any) -> Iterator[Any]:
    with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        yield orbax_ext.restore_async(made, None, args=ocp.args.StandardRestore(abstract()), **arguments)


@contextlib.contextmanager
def checkpointer(path: str, **arguments: Any) -> Iterator[Any]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as made:
        yield orbax_ext.restore_async(made, f"{path}/manager/0/default", args=pytree_args(), **arguments)


@contextlib.contextmanager
def standard_checkpointer(path: str, **arguments: Any) -> Iterator[Any]:
    args = ocp.args.StandardRestore(abstract())
    with ocp.StandardCheckpointer() as made:
        yield orbax_ext.restore_async(made, f"{path}/manager/0/default", args=args, **arguments)


@contextlib.contextmanager
def composite(path: str, **arguments: Any) -> Iterator[Any]:
    args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract()), notes=ocp.args.JsonRestore())
    with ocp.CheckpointManager(f"{path}/composite") as made:
        yield orbax_ext.restore_async(made, 0, args=args, **arguments)


@contextlib.contextmanager
def v1(path: str, **arguments: Any) -> Iterator[Any]:
    yield orbax_ext.v1.load_async(f"{path}/v1", abstract(), **arguments)


@contextlib.contextmanager
def v1_context(path: str, **arguments: Any) -> Iterator[Any]:
    with orbax_ext.v1.context(strategy="spread", **GROUPS):
        pending = orbax_ext.v1.load_async(f"{path}/v1", abstract(), **arguments)
    yield pending


WAYS = {
    way.__name__: way
    for way in (
        manager,
        manager_registered,
        manager_registered_single,
        manager_with_stock_handler,
        own_handler,
        latest_standard,
        checkpointer,
        standard_checkpointer,
        composite,
        v1,
        v1_context,
    )
}


def restore(path: str, way: str, *, context: str = "none", **arguments: Any) -> Restored:
    """Reads ahead, with everything else forbidden, and then takes the result."""
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    with states.in_context(context, MESH.make()):
        forbidden = contextlib.ExitStack()
        with nothing_but_reading_from_the_start(forbidden), WAYS[way](path, **arguments) as pending, forbidden:
            ahead = wait(pending)
            forbidden.close()
            before = counters.bytes_read()
            state = pending.result()
            read = counters.bytes_read() - before
        jax.block_until_ready(jax.tree.leaves(dict(state.items())))
    report = orbax_ext.last_report()
    strategy = states.strategy_names(report.strategy.values()) if report else ()
    if way == "composite":
        assert state["notes"] == {"epoch": 3}
        state = state["params"]
    assert ocp.type_handlers.get_type_handler(jax.Array) is registered
    found = differences(state, step=1 if way == "latest_standard" else 0)
    return Restored(found, ahead, read, frozenset(strategy), tuple(threads()))


def restore_in_background(path: str, way: str, context: str) -> Restored:
    """Restores with `exchange="background"`."""
    with states.in_context(context, MESH.make()), WAYS[way](path, exchange="background") as pending:
        compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
        wait(pending)
        state = pending.result()
        jax.block_until_ready(state)
    assert compiled is not None
    return Restored(differences(state), 0, 0, frozenset(), tuple(threads()))


def leave(path: str) -> list[tuple[str, int, list[str]]]:
    """Leaves pending restores in every way; returns what is left: (way, bytes of memory, threads)."""
    left = []
    tracemalloc.start()
    # What the first one leaves is JAX's and Python's: modules, traced programs.
    for way in ("first", "cancelled", "dropped", "with", "at once", "background", "background, dropped"):
        gc.collect()
        before = _held_bytes()
        with ocp.CheckpointManager(f"{path}/manager") as made:
            arguments: Any = {"exchange": "background"} if way.startswith("background") else {}
            pending = orbax_ext.restore_async(made, 0, args=pytree_args(), **arguments)
            if way != "at once":
                assert wait(pending) > SHARE
                assert _held_bytes() - before > SHARE
            if way == "with":
                with pending:
                    pass
            elif not way.endswith("dropped"):
                assert pending.cancel()
                assert pending.cancel()  # again
                _refuses(pending)
            if way.endswith("dropped"):
                del pending
            gc.collect()
            left.append((way, _held_bytes() - before, threads()))  # while `pending` is there, unless it was dropped
    tracemalloc.stop()
    return left[1:]


def restore_what_is_held(path: str, room: Sequence[int]) -> tuple[list[str], int, int]:
    """Restores with `auto` when all is held that the memory of each process has room for beyond its share.

    Returns the differences, how many groups travelled, and how many were there as a whole. Nothing may be read.
    """
    limit = SHARE + SMALL + room[jax.process_index()]
    fetch = boxes.fetch
    read: list[Any] = []

    async def noted(reader: Any, items: Sequence[Any]) -> Any:
        read.extend(items)
        return await fetch(reader, items)

    with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        pending = orbax_ext.restore_async(made, 0, args=pytree_args(), host_memory_limit_bytes=limit)
        wait(pending)
        with (
            mock.patch.object(boxes, "fetch", noted),
            mock.patch.object(Executor, "start_exchange", autospec=True, side_effect=Executor.start_exchange) as moved,
            mock.patch.object(Executor, "read_whole", autospec=True, side_effect=Executor.read_whole) as there,
        ):
            state = pending.result()
    assert read == []
    return differences(state), moved.call_count, there.call_count


def held_while_pending(path: str, limit: int) -> int:
    """Returns the bytes that a restore holds before its result."""
    tracemalloc.start()
    held = 0
    for _ in range(2):  # what the first one leaves is JAX's and Python's
        gc.collect()
        before = _held_bytes()
        with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
            pending = orbax_ext.restore_async(made, 0, args=pytree_args(), host_memory_limit_bytes=limit)
            assert wait(pending) > 0
            held = _held_bytes() - before
            assert pending.cancel()
    tracemalloc.stop()
    return held


def _held_bytes() -> int:
    """Returns the bytes of Python's memory and of all arrays."""
    return tracemalloc.get_traced_memory()[0] + sum(
        shard.data.nbytes for array in jax.live_arrays() for shard in array.addressable_shards
    )


def _refuses(pending: Any) -> None:
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result()


def several(path: str) -> list[list[str]]:
    """Two pending restores, an ordinary one and a save meanwhile; then each result, twice."""
    mesh, found = MESH.make(), []
    with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        first = orbax_ext.restore_async(made, 0, args=pytree_args())
        second = orbax_ext.restore_async(made, 1, args=pytree_args())
        found.append(differences(made.restore(1, args=pytree_args()), step=1))
        made.save(2, args=ocp.args.PyTreeSave(states.make_state({"step": STATE["step"]}, mesh)))
        found += [differences(first.result()), differences(second.result(), step=1)]
        made.wait_until_finished()
        try:
            first.result()
        except RuntimeError as error:
            found.append([str(error)])
        assert not second.cancel()
    return [*found, threads()]


def several_in_background(path: str) -> list[list[str]]:
    with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        pending = [orbax_ext.restore_async(made, step, args=pytree_args(), exchange="background") for step in (0, 1)]
        return [*(differences(one.result(), step) for step, one in enumerate(pending)), threads()]


def restore_different_steps(path: str) -> list[str]:
    """Returns the errors of an ordinary and of a pending restore, where process 1 asks for another step."""
    step, texts = int(jax.process_index() == 1), []
    with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        pending = orbax_ext.restore_async(made, step, args=pytree_args())
        restores: list[Callable[[], Any]] = [lambda: made.restore(step, args=pytree_args()), pending.result]
        for restore in restores:
            with pytest.raises(orbax_ext.PlanMismatchError) as raised:
                restore()
            texts.append(str(raised.value))
    return texts


def fail(path: str, absent: int | None = None, limit: float | None = None, **arguments: Any) -> list[str]:
    """Returns the error of `result`, twice, and what is left. Process `absent` begins, but asks for no result."""
    texts, began = [], time.monotonic()
    stall = 4.0 if absent is not None and limit is None else PATIENCE  # where it is what ends the restore
    with orbax_ext.registered(stall_timeout=stall, **GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        pending = orbax_ext.restore_async(made, 0, args=pytree_args(), **arguments)
        if jax.process_index() == absent:
            pending.cancel()
            return []
        for _ in range(2):
            with pytest.raises(Exception, match=r"\w") as raised:
                pending.result(limit)
            assert pending.exception() is raised.value
            texts.append(text_of(raised.value))
    assert limit is None or time.monotonic() - began < PATIENCE / 2
    return [*texts, *threads()]


def fail_on_one(path: str, exchange: str) -> list[str]:
    """Returns the error of `result` while process 2 can read nothing, and what is left."""
    fetch = boxes.fetch

    async def failing(*given: Any) -> Any:
        if jax.process_index() == 2:
            raise OSError("the disk is gone")
        return await fetch(*given)

    with (
        mock.patch.object(boxes, "fetch", failing),
        orbax_ext.registered(strategy="spread", strict_readers=True, **GROUPS),
        ocp.CheckpointManager(f"{path}/manager") as made,
    ):
        pending: Any = orbax_ext.restore_async(made, 0, args=pytree_args(), exchange=exchange)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="the disk is gone") as raised:
            pending.result()
    return [text_of(raised.value), *threads()]


def losses(program: str, checkpoints: str, steps: int) -> list[str]:
    """Runs a program of examples/ and returns the losses that this process prints."""
    arguments = [program, checkpoints, "--steps", str(steps), "--save-every", "3"]
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(jax.distributed, "initialize"),  # this process has joined already
    ):
        runpy.run_path(program, run_name="__main__")
    return output.getvalue().splitlines()


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def ask_for_no_step(path: str) -> tuple[str, str]:
    """Returns the errors of a pending and of an ordinary restore of a step that does not exist."""
    with orbax_ext.registered(), ocp.CheckpointManager(f"{path}/manager") as made:
        with pytest.raises(Exception, match=r"\w") as pending:
            orbax_ext.restore_async(made, 77, args=pytree_args()).result()
        with pytest.raises(Exception, match=r"\w") as ordinary:
            made.restore(77, args=pytree_args())
    return text_of(pending.value), text_of(ordinary.value)


def delete_meanwhile(path: str) -> tuple[str, str, list[str]]:
    """Returns the errors of a pending and of an ordinary restore of a step that is deleted, and what is left."""
    with orbax_ext.registered(**GROUPS), ocp.CheckpointManager(f"{path}/manager") as made:
        pending = orbax_ext.restore_async(made, 1, args=pytree_args())
        wait(pending)
        made.delete(1)
        with pytest.raises(Exception, match=r"\w") as of_pending:
            pending.result()
        with pytest.raises(Exception, match=r"\w") as ordinary:
            made.restore(1, args=pytree_args())
    return text_of(of_pending.value), text_of(ordinary.value), threads()


def wait_a_little(path: str) -> list[Any]:
    """Asks a restore in the background for its result before it can be there, then again."""
    fetch, go_on = boxes.fetch, threading.Event()

    async def held_back(*given: Any) -> Any:
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        return await fetch(*given)

    with (
        mock.patch.object(boxes, "fetch", held_back),
        orbax_ext.registered(**GROUPS),
        ocp.CheckpointManager(f"{path}/manager") as made,
    ):
        pending = orbax_ext.restore_async(made, 0, args=pytree_args(), exchange="background")
        with pytest.raises(orbax_ext.RestoreTimeoutError) as raised:
            pending.result(timeout=0.0)
        go_on.set()
        return [str(raised.value), differences(pending.result(timeout=PATIENCE))]


def cancel_at_the_end(path: str) -> list[str]:
    """Cancels on all processes while process 0 still waits for reports; returns the threads that are left."""
    reached, go_on, collected = threading.Event(), threading.Event(), threading.Event()
    pack, collect_reports = collect.pack, collect.collect

    def held_back(*given: Any) -> str:
        if jax.process_index() == 0:
            reached.set()
            go_on.wait(PATIENCE)
        return pack(*given)

    async def noted(*given: Any) -> None:
        await collect_reports(*given)
        collected.set()

    with (
        mock.patch.object(collect, "pack", held_back),
        mock.patch.object(collect, "collect", noted),
        orbax_ext.registered(**GROUPS),
        ocp.CheckpointManager(f"{path}/manager") as made,
    ):
        pending: Any = orbax_ext.restore_async(made, 0, args=pytree_args(), exchange="background")
        assert (reached if jax.process_index() == 0 else collected).wait(PATIENCE)
        pending._stop()
        go_on.set()
        assert pending.cancel()
        left = threads(PATIENCE / 2)
    return left if left else agree()


def cancel_on_one(path: str, where: str) -> list[str]:
    """Cancels on process 1 while process 2 reads and process 1 does too, or waits for it; returns what `result` raises.

    Then all processes run a program together.
    """
    fetch, reached, go_on = boxes.fetch, threading.Event(), threading.Event()
    late = (1, 2) if where == "read" else (2,)
    arrive_at = Session.meet

    async def held_back(*given: Any) -> Any:
        reached.set()
        while jax.process_index() in late and not go_on.is_set():
            await asyncio.sleep(0.01)
        return await fetch(*given)

    def meet(session: Any, phase: str, *given: Any) -> Any:
        if phase.startswith("read group") and where == "meeting":
            reached.set()
        return arrive_at(session, phase, *given)

    if where == "meeting" and jax.process_index() == 1:
        patched: Any = mock.patch.object(Session, "meet", meet)
    else:
        patched = mock.patch.object(boxes, "fetch", held_back)
    with (
        patched,
        orbax_ext.registered(strategy="spread", stall_timeout=PATIENCE, **GROUPS),
        ocp.CheckpointManager(f"{path}/manager") as made,
    ):
        pending: Any = orbax_ext.restore_async(made, 0, args=pytree_args(), exchange="background")
        if jax.process_index() == 1:
            assert reached.wait(PATIENCE)
            assert pending.cancel()
        with pytest.raises(BaseException, match=r"cancelled|CancelledError") as raised:
            pending.result()
        left = threads(PATIENCE / 2)
        go_on.set()
    return [text_of(raised.value), *(left if left else agree())]


def agree() -> list[str]:
    """Runs a program of all processes."""
    multihost_utils.sync_global_devices("all processes are there")
    return []
