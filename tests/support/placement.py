"""Helpers for the scenarios of tests/multiprocess/placement, which run inside the processes of a cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from orbax_ext.upstream.runtime import coordination_client

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
_COMPILED = "/jax/core/compile/backend_compile_duration"
_compiled = [0]
_listening: list[bool] = []


def make_mesh(types: tuple[Any, ...] = (AUTO, AUTO, AUTO)) -> Mesh:
    """Returns a mesh of eight devices: a=1, b=4, c=2."""
    return Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("a", "b", "c"), axis_types=types)


def each_scope() -> Iterator[str]:
    """Yields the name of every scope while that scope is in force."""
    for name in ("none", "auto", "explicit", "mixed", "devices in another order", "one process's devices"):
        with scope(name):
            yield name


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    meshes = {
        "auto": lambda: make_mesh(),
        "explicit": lambda: make_mesh((EXPLICIT,) * 3),
        "mixed": lambda: make_mesh((AUTO, EXPLICIT, AUTO)),
        "devices in another order": lambda: Mesh(np.array(jax.devices()[::-1]), ("z",), axis_types=(EXPLICIT,)),
        "one process's devices": lambda: Mesh(np.array(jax.local_devices()), ("z",)),
    }
    with jax.set_mesh(meshes[name]()) if name in meshes else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def no_programs() -> Iterator[None]:
    """Asserts that the block compiles no program. Use shapes for which nothing was compiled before."""
    if not _listening:
        jax.monitoring.register_event_duration_secs_listener(_count_compilation)
        _listening.append(True)
        jax.jit(lambda x: x + 1)(np.zeros((3, 1, 4)))
        assert _compiled[0] > 0, "this release of JAX reports compilations under another name"
    before = _compiled[0]
    yield
    assert _compiled[0] == before, f"{_compiled[0] - before} programs were compiled"


def _count_compilation(event: str, duration: float, **rest: Any) -> None:
    _compiled[0] += event == _COMPILED


def assert_holds(array: jax.Array, expected: np.ndarray[Any, Any]) -> None:
    """Asserts that this process's shards have exactly the expected bytes."""
    assert array.shape == expected.shape
    assert array.addressable_shards, "there is nothing to compare"
    for shard in array.addressable_shards:
        data = np.asarray(shard.data)
        assert data.dtype == expected.dtype
        assert data.tobytes() == expected[shard.index].tobytes(), shard


def some_keys(impl: str = "threefry2x32") -> jax.Array:
    """Returns eight typed keys without running a program, as jax.random.split would."""
    words = {"threefry2x32": 2, "rbg": 4}[impl]
    return jax.random.wrap_key_data(np.arange(8 * words, dtype=np.uint32).reshape(8, words), impl=impl)


def pointers(array: jax.Array) -> dict[Any, int]:
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def error_of(call: Callable[[], Any]) -> str:
    """Returns the exception that a call raises as text, or "" if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def waits_for_process_1(name: str, call: Callable[[], Any], patience: float = 2.0) -> bool:
    """Returns whether a call on all other processes waits until process 1 makes it too. Runs on every process.

    `patience` are the seconds after which a call counts as waiting: many for one that should not wait.
    """
    client = coordination_client()
    if jax.process_index() == 1:
        client.blocking_key_value_get(f"join/{name}", 60_000)
        call()
        return True
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(patience)
    waiting = thread.is_alive()
    client.key_value_set(f"tried/{name}/{jax.process_index()}", "")
    if jax.process_index() == 0:
        for rank in range(jax.process_count()):
            if rank != 1:
                client.blocking_key_value_get(f"tried/{name}/{rank}", 60_000)
        client.key_value_set(f"join/{name}", "")
    thread.join(60)
    assert not thread.is_alive()
    return waiting
