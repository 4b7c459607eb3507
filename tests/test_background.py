"""`restore_async` on one process. tests/multiprocess/test_restore_async.py has several."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import gc
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_ext
from orbax_ext.storage import counters
from orbax_ext.transfer import boxes, pending_restore
from tests.support import states


def state() -> dict[str, Any]:
    sharding = NamedSharding(jax.make_mesh((1, 1), ("dp", "tp")), P("tp"))
    return {
        "sharded": jax.device_put(jnp.arange(1 << 16, dtype=jnp.float32), sharding),
        "on_one_device": jax.device_put(jnp.arange(1 << 15, dtype=jnp.int8), SingleDeviceSharding(jax.devices()[0])),
        "scalar": jax.device_put(jnp.int32(7), sharding.update(spec=P())),
        "cast": jax.device_put(jnp.arange(9, dtype=jnp.float32), sharding),
        "key": jax.random.key(3),
        "numpy": np.arange(5),
        "number": 3,
    }


def abstract() -> dict[str, Any]:
    def describe(leaf: Any) -> Any:
        array = isinstance(leaf, jax.Array)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if array else leaf

    tree = {name: describe(leaf) for name, leaf in state().items()}
    return {**tree, "cast": tree["cast"].update(dtype=jnp.bfloat16)}


HELD = (4 << 16) + (1 << 15)  # bytes of the large leaves


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("background")
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state()))
    return path


def begin(manager: Any, **arguments: Any) -> orbax_ext.PendingRestore:
    return orbax_ext.restore_async(manager, 3, args=ocp.args.StandardRestore(abstract()), **arguments)


def wait(pending: orbax_ext.PendingRestore) -> int:
    deadline = time.monotonic() + 60
    while not pending.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pending.progress().done


def assert_restored(restored: dict[str, Any]) -> None:
    for name, expected in state().items():
        found = restored[name]
        if name == "cast":
            expected = expected.astype(jnp.bfloat16)
        if isinstance(expected, jax.Array):
            assert found.sharding == expected.sharding, name
            assert found.dtype == expected.dtype, name
        if name == "key":
            found, expected = jax.random.key_data(found), jax.random.key_data(expected)
        assert states.bits(found) == states.bits(expected), name


def test_leaves_of_every_kind_are_restored_and_large_ones_are_read_ahead(saved: pathlib.Path) -> None:
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager)
        assert wait(pending) >= HELD
        before = counters.bytes_read()
        assert_restored(pending.result())
        assert counters.bytes_read() - before < 8 << 10
        assert pending.progress().done == pending.progress().total >= HELD


def test_what_could_not_be_read_ahead_does_not_count_as_done(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = boxes.fetch

    async def nothing_ahead(*given: Any) -> Any:
        ahead = threading.current_thread().name.startswith("orbax_ext read")
        return {} if ahead else await fetch(*given)

    monkeypatch.setattr(boxes, "fetch", nothing_ahead)
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager)
        assert wait(pending) == 0
        assert_restored(pending.result())


@pytest.mark.parametrize("exchange", ["result", "background"])
def test_it_works_while_an_event_loop_runs(saved: pathlib.Path, exchange: str) -> None:
    """As in a notebook."""

    async def cell(manager: Any) -> Any:
        pending = begin(manager, exchange=exchange)
        assert exchange == "background" or wait(pending) >= HELD
        return pending.result()

    with ocp.CheckpointManager(saved) as manager:
        assert_restored(asyncio.run(cell(manager)))


def test_a_registration_that_has_ended_meanwhile_does_no_harm(saved: pathlib.Path) -> None:
    with ocp.CheckpointManager(saved) as manager:
        with orbax_ext.registered(strategy="direct"):
            pending = begin(manager)
        assert_restored(pending.result())
    assert not isinstance(ocp.type_handlers.get_type_handler(jax.Array), orbax_ext.BroadcastArrayHandler)


def test_the_end_of_a_block_gives_it_up(saved: pathlib.Path) -> None:
    before = {*threading.enumerate()}
    with ocp.CheckpointManager(saved) as manager, begin(manager) as pending:
        pass
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("orbax_ext")]
    assert pending.cancel()
    assert "cancelled" in str(pending.exception())


def test_the_block_may_have_taken_the_result(saved: pathlib.Path) -> None:
    with ocp.CheckpointManager(saved) as manager, begin(manager) as pending:
        restored = pending.result()
    assert_restored(restored)
    assert not pending.cancel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exchange": "foreground"}, "exchange must be one of result, background; found 'foreground'"),
        ({"host_memory_limit_bytes": -1}, "host_memory_limit_bytes must be 0 or more; found -1"),
    ],
)
def test_bad_arguments_are_refused_at_once(saved: pathlib.Path, arguments: dict[str, Any], message: str) -> None:
    with ocp.CheckpointManager(saved) as manager, pytest.raises(ValueError, match=message):
        begin(manager, **arguments)
    with pytest.raises(ValueError, match=message):
        orbax_ext.v1.load_async(saved / "3", **arguments)


def test_what_can_not_restore_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes a CheckpointManager or a Checkpointer; found a str.*v1\.load_async"):
        orbax_ext.restore_async("/checkpoints", 3)


def test_a_registry_without_orbax_ext_is_refused(saved: pathlib.Path) -> None:
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, ocp.type_handlers.ArrayHandler()))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer, pytest.raises(ValueError, match=r"orbax_ext\.pytree_handler\(\)"):
        orbax_ext.restore_async(checkpointer, saved / "3" / "default", args=ocp.args.PyTreeRestore())


@pytest.mark.parametrize("stuck", ["restore", "read-ahead"])
def test_storage_that_does_not_answer_ends_a_restore_of_one_process(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    fetch, reached = boxes.fetch, threading.Event()

    async def never(*given: Any) -> Any:
        ahead = threading.current_thread().name.startswith("orbax_ext read")
        if ahead != (stuck == "read-ahead"):
            return await fetch(*given)
        reached.set()
        return await asyncio.Event().wait()

    monkeypatch.setattr(boxes, "fetch", never)
    with orbax_ext.registered(stall_timeout=3.0), ocp.CheckpointManager(saved) as manager:  # metadata has it too
        pending = begin(manager, **({"host_memory_limit_bytes": 0} if stuck == "restore" else {}))
        assert stuck == "restore" or reached.wait(60)
        with pytest.raises(orbax_ext.RestoreTimeoutError, match=r"process 0 has read nothing for 3 s") as raised:
            pending.result()
    assert raised.value.missing == (0,)
    assert raised.value.phases == {0: "read"}


def test_the_timeout_ends_a_restore_of_one_process(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Gate(monkeypatch)
    args, began = ocp.args.StandardRestore(abstract()), time.monotonic()
    with ocp.CheckpointManager(saved) as manager:
        with orbax_ext.registered(stall_timeout=60.0):
            pending = begin(manager, host_memory_limit_bytes=0)
            with pytest.raises(
                orbax_ext.RestoreTimeoutError, match=r"process 0 has not read all within .* \(timeout\)"
            ):
                pending.result(timeout=1.0)
        late = pytest.raises(orbax_ext.RestoreTimeoutError, match=r"process 0 has not read all within 0\.5 s")
        with orbax_ext.registered(stall_timeout=60.0, timeout=0.5), late:
            manager.restore(3, args=args)
    assert time.monotonic() - began < 30


def test_the_timeout_is_for_all_items_together(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, names = boxes.fetch, ("one", "two", "three", "four")

    async def slow(*given: Any) -> Any:
        await asyncio.sleep(1.0)
        return await fetch(*given)

    monkeypatch.setattr(boxes, "fetch", slow)
    composite = ocp.args.Composite
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=composite(**{name: ocp.args.StandardSave(state()) for name in names}))
        manager.wait_until_finished()
        args = composite(**{name: ocp.args.StandardRestore(abstract()) for name in names})
        pending = orbax_ext.restore_async(manager, 3, args=args, host_memory_limit_bytes=0)
        with pytest.raises(orbax_ext.RestoreTimeoutError, match=r"\(timeout\)"):
            pending.result(timeout=3.0)


@pytest.mark.parametrize("exchange", ["result", "background"])
def test_a_cancelled_restore_keeps_nothing(saved: pathlib.Path, exchange: str) -> None:
    with ocp.CheckpointManager(saved) as manager:
        gc.collect()
        before = {id(array) for array in jax.live_arrays()}
        pending = begin(manager, exchange=exchange)
        wait(pending)
        assert pending.cancel()
        gc.collect()
        assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
        assert isinstance(pending.exception(), concurrent.futures.CancelledError)


def test_a_restore_that_is_cancelled_before_it_ends_keeps_nothing(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state comes when nobody wants it any more."""
    restored, cancelled = threading.Event(), threading.Event()
    deserialize = orbax_ext.BroadcastArrayHandler.deserialize

    async def late(*given: Any) -> Any:
        arrays = await deserialize(*given)
        restored.set()
        cancelled.wait(60)
        return arrays

    monkeypatch.setattr(orbax_ext.BroadcastArrayHandler, "deserialize", late)
    with ocp.CheckpointManager(saved) as manager:
        gc.collect()
        before = {id(array) for array in jax.live_arrays()}
        pending = begin(manager, exchange="background")
        assert restored.wait(60)
        pending._stop()
        cancelled.set()
        wait(pending)
        assert pending.cancel()
        gc.collect()
        assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_that_is_not_positive_is_refused_and_costs_nothing(saved: pathlib.Path, timeout: float) -> None:
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager)
        assert wait(pending) >= HELD
        with pytest.raises(
            ValueError, match=r"timeout must be a positive number of seconds or None; found (0|-1\.0)\."
        ):
            pending.result(timeout)
        assert pending.exception() is None
        before = counters.bytes_read()
        assert_restored(pending.result())
        assert counters.bytes_read() - before < 8 << 10


def test_a_manager_of_another_kind_is_named_with_its_module() -> None:
    class CheckpointManager:
        """As Orbax's emergency manager is called, too."""

    with pytest.raises(ValueError, match=r"takes a CheckpointManager .*; found a tests\.test_background\..*Manager\."):
        orbax_ext.restore_async(CheckpointManager(), 3)


class Gate:
    """Holds back all reads until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._fetch = boxes.fetch
        monkeypatch.setattr(boxes, "fetch", self._hold_back)

    async def _hold_back(self, *given: Any) -> Any:
        self.reached.set()
        while not self.open.is_set():
            await asyncio.sleep(0.01)
        return await self._fetch(*given)


@pytest.mark.parametrize("exchange", ["result", "background"])
def test_progress_has_a_rate_and_the_time_left(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    gate = Gate(monkeypatch)
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager, exchange=exchange)
        assert gate.reached.wait(60)
        first = pending.progress()
        assert (first.rate, first.remaining) == (0.0, None)
        assert first.done < HELD  # metadata may count
        gate.open.set()
        wait(pending)
        last = pending.progress()
        assert last.rate > 0
        assert last.done == last.total >= HELD
        assert last.remaining == 0.0
        assert_restored(pending.result())


def test_dropping_a_restore_that_runs_in_the_background_ends_it(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, before = Gate(monkeypatch), {*threading.enumerate()}
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager, exchange="background")
        assert gate.reached.wait(60)
        (thread,) = [one for one in {*threading.enumerate()} - before if one.name == "orbax_ext restore"]
        del pending
        gc.collect()
        thread.join(30.0)
        assert not thread.is_alive()
        assert not gate.open.is_set()


def registered_handler() -> Any:
    return ocp.type_handlers.get_type_handler(jax.Array)


def test_a_registration_while_a_restore_runs_in_the_background_stays(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, stock = Gate(monkeypatch), registered_handler()
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager, exchange="background")
        assert gate.reached.wait(60)
        ours = orbax_ext.register()
        gate.open.set()
        assert_restored(pending.result())
        assert registered_handler() is ours
        orbax_ext.unregister()
    assert registered_handler() is stock


def test_a_registered_block_around_the_result_of_a_restore_in_the_background_leaves_nothing(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, stock = Gate(monkeypatch), registered_handler()
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager, exchange="background")
        assert gate.reached.wait(60)
        with orbax_ext.registered():
            gate.open.set()
            assert_restored(pending.result())
    assert registered_handler() is stock


def test_a_restore_in_the_background_keeps_the_registration_with_which_it_was_begun(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ended, strategies = registered_handler(), threading.Event(), []
    deserialize = orbax_ext.BroadcastArrayHandler.deserialize

    async def noted(handler: Any, *given: Any) -> Any:
        strategies.append(handler.options.strategy)
        return await deserialize(handler, *given)

    monkeypatch.setattr(orbax_ext.BroadcastArrayHandler, "deserialize", noted)
    monkeypatch.setattr(pending_restore, "settings_of_thread", lambda: lambda: ended.wait(60))  # before it looks
    with ocp.CheckpointManager(saved) as manager:
        with orbax_ext.registered(strategy="direct"):
            pending = begin(manager, exchange="background")
        ended.set()
        assert_restored(pending.result())
    assert strategies == ["direct"]
    assert registered_handler() is stock


@pytest.mark.once
@pytest.mark.parametrize("exchange", ["result", "background"])
def test_the_interpreter_ends_while_a_restore_is_pending(saved: pathlib.Path, exchange: str) -> None:
    """A thread that is still there may be inside C++ when the interpreter ends, which aborts the process."""
    command = [
        sys.executable,
        "-c",
        f"from tests import test_background as b; b.exit_early({str(saved)!r}, {exchange!r})",
    ]
    ended = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "left: []"
    assert "never retrieved" not in ended.stderr


def exit_early(path: str, exchange: str) -> None:
    """Prints what is left of a restore whose program ends while it reads."""
    reached = threading.Event()

    async def fetch(*given: Any) -> Any:
        reached.set()
        return await asyncio.Event().wait()

    atexit.register(lambda: print("left:", [one.name for one in threading.enumerate() if "orbax_ext" in one.name]))
    boxes.fetch = fetch  # type: ignore[assignment]
    pending = begin(ocp.CheckpointManager(path), exchange=exchange)
    assert reached.wait(60)
    assert not pending.done()
    sys.exit()
