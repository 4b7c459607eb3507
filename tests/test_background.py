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
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_ext
from orbax_ext.storage import counters, s3
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


def test_what_fails_ahead_does_not_count_at_all(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = boxes.fetch

    async def failing_ahead(*given: Any) -> Any:
        if threading.current_thread().name.startswith("orbax_ext read"):
            raise OSError("busy")
        return await fetch(*given)

    monkeypatch.setattr(boxes, "fetch", failing_ahead)
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager)
        wait(pending)
        assert (pending.progress().done, pending.progress().total) == (0, 0)
        assert str(pending.exception()) == "busy"
        assert_restored(pending.result())


def test_the_error_in_reading_ahead_is_told_and_the_result_has_its_own(saved: pathlib.Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        pending = orbax_ext.restore_async(checkpointer, saved / "77", args=ocp.args.PyTreeRestore())
        wait(pending)
        assert isinstance(ahead := pending.exception(), FileNotFoundError)
        with pytest.raises(FileNotFoundError, match="77") as raised:
            pending.result()
        assert pending.exception() is raised.value is not ahead


@pytest.mark.parametrize("ocdbt", [True, False])
def test_what_is_saved_meanwhile_under_the_same_name_is_restored_as_a_whole(
    tmp_path: pathlib.Path, ocdbt: bool
) -> None:
    first = {name: leaf for name, leaf in state().items() if name in ("sharded", "on_one_device")}
    second = jax.tree.map(lambda leaf: leaf + 1, first)
    target = {name: leaf for name, leaf in abstract().items() if name in first}
    args = ocp.args.PyTreeRestore(target, restore_args=orbax_ext.restore_args(target))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave(first))
        pending = orbax_ext.restore_async(checkpointer, tmp_path / "state", args=args)
        assert wait(pending) >= HELD
        checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave(second), force=True)
        restored = pending.result()
    assert [name for name, leaf in second.items() if states.bits(restored[name]) != states.bits(leaf)] == []


@pytest.mark.parametrize("form", ["manager", "own_handler", "checkpointer", "standard_checkpointer", "composite"])
def test_without_args_everything_is_read_ahead_too(saved: pathlib.Path, form: str) -> None:
    made: dict[str, Any] = {
        "manager": lambda: ocp.CheckpointManager(saved),
        "own_handler": lambda: ocp.CheckpointManager(saved, item_handlers=orbax_ext.pytree_handler()),
        "checkpointer": lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()),
        "standard_checkpointer": ocp.StandardCheckpointer,
        "composite": lambda: ocp.Checkpointer(ocp.CompositeCheckpointHandler()),
    }
    place = {"composite": saved / "3"}.get(form, saved / "3" / "default")
    with made[form]() as checkpointer:
        step = 3 if isinstance(checkpointer, ocp.CheckpointManager) else place
        pending = orbax_ext.restore_async(checkpointer, step)
        assert wait(pending) >= 4 << 16
        assert pending.exception() is None
        before = counters.bytes_read()
        restored = pending.result()
        assert counters.bytes_read() - before < 64 << 10
    restored = restored["default"] if form == "composite" else restored
    assert states.bits(restored["sharded"]) == states.bits(state()["sharded"])


@pytest.mark.once
def test_stacked_leaves_are_read_ahead_as_they_are_stored(tmp_path: pathlib.Path) -> None:
    sharding = NamedSharding(jax.make_mesh((1,), ("dp",)), P())
    data = jnp.arange(1 << 16, dtype=jnp.float32)
    target = {"w": jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", args=ocp.args.PyTreeSave({"w": jax.device_put(data[None], sharding)}))
        args = ocp.args.PyTreeRestore(target, restore_args=orbax_ext.restore_args(target, stacked=True))
        pending = orbax_ext.restore_async(checkpointer, tmp_path / "state", args=args)
        assert wait(pending) >= data.nbytes
        before = counters.bytes_read()
        restored = pending.result()
        assert counters.bytes_read() - before < data.nbytes // 2
    assert restored["w"].shape == data.shape
    assert states.bits(restored["w"]) == states.bits(data)


@pytest.mark.parametrize("api", ["v0", "v1"])
def test_on_s3_metadata_is_waited_for_as_long_as_the_result_may_take(
    saved: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    deserialize, totals = orbax_ext.BroadcastArrayHandler.deserialize, []

    async def noted(*given: Any) -> Any:
        totals.append(s3._limits[-1].total)
        return await deserialize(*given)

    monkeypatch.setattr(orbax_ext.BroadcastArrayHandler, "deserialize", noted)
    with ocp.CheckpointManager(saved) as manager:
        if api == "v0":
            pending = begin(manager)
        else:
            getattr(ocp_v1, "save", ocp_v1.save_pytree)(tmp_path / "v1", {"sharded": state()["sharded"]})
            pending = orbax_ext.v1.load_async(tmp_path / "v1", {"sharded": abstract()["sharded"]})
        pending.result(timeout=50.0)
    assert len(totals) == 1
    assert totals[0] is not None
    assert totals[0] <= 50.0


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


class Order:
    """Notes which handlers restore, by their strategy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strategies: list[str] = []
        self._deserialize = orbax_ext.BroadcastArrayHandler.deserialize
        monkeypatch.setattr(orbax_ext.BroadcastArrayHandler, "deserialize", lambda *given: self._note(*given))

    async def _note(self, handler: Any, *given: Any) -> Any:
        self.strategies.append(handler.options.strategy)
        return await self._deserialize(handler, *given)


def test_a_restore_in_the_background_comes_before_a_later_result(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two processes could restore in a different order."""
    go_on, order = threading.Event(), Order(monkeypatch)
    monkeypatch.setattr(pending_restore, "settings_of_thread", lambda: lambda: go_on.wait(60))
    with ocp.CheckpointManager(saved) as manager:
        pending = begin(manager)
        with orbax_ext.registered(strategy="direct"):
            background = begin(manager, exchange="background")
        threading.Timer(1.0, go_on.set).start()
        assert_restored(pending.result())
        assert_restored(background.result())
    assert order.strategies == ["direct", "auto"]


@pytest.mark.parametrize("exchange", ["result", "background"])
def test_a_restore_does_not_wait_for_ever_for_one_in_the_background(
    saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    gate = Gate(monkeypatch)
    with ocp.CheckpointManager(saved) as manager:
        with orbax_ext.registered(stall_timeout=60.0):
            first = begin(manager, exchange="background")
        assert gate.reached.wait(60)
        with orbax_ext.registered(stall_timeout=0.5):
            second = begin(manager, exchange=exchange, host_memory_limit_bytes=0)
            with pytest.raises(orbax_ext.RestoreTimeoutError, match=r"another restore .* read nothing for 0\.5 s"):
                second.result()
        gate.open.set()
        assert_restored(first.result())


def test_a_thread_that_can_not_start_leaves_nothing(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = registered_handler()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start new thread {thread.name}")

    with ocp.CheckpointManager(saved) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="orbax_ext restore"):
                begin(manager, exchange="background")
        assert registered_handler() is stock
        assert_restored(begin(manager, exchange="background").result())


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
