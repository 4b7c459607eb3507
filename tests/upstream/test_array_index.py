"""Arrays that are found by an index in memory are those of the checkpoint."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from orbax_ext.storage import counters
from orbax_ext.upstream.array_handler import array_context, array_store
from orbax_ext.upstream.array_index import indexed, ranges, without_index

pytestmark = pytest.mark.once

VALUES = {f"small_{number:03}": np.arange(number, number + 64, dtype=np.int32) for number in range(150)}


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        state = {name: jnp.asarray(value) for name, value in VALUES.items()}
        save_args = {name: ocp.SaveArgs(chunk_byte_size=64) for name in VALUES}  # four chunks
        checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave(state, save_args))
    return tmp_path / "step"


def read(store: Any, names: list[str], context: Any) -> list[np.ndarray]:
    specs = [{"driver": "zarr", "kvstore": {**store, "path": name}} for name in names]
    return [ts.open(spec, open=True, context=context).result().read().result() for spec in specs]


def test_arrays_are_found_by_the_index(saved: pathlib.Path) -> None:
    names, context = list(VALUES)[20:140], array_context(True)
    store = array_store(saved, None, True)
    index: Any = asyncio.run(indexed(store, names, range(20, 140), context))
    assert index["manifest"].startswith("memory://")
    for name, found in zip(names, read(index, names, context), strict=True):
        assert found.tobytes() == VALUES[name].tobytes()
    assert (
        not ts.KvStore.open({**index}, context=context).result().list().result(timeout=10)[0].startswith(b"small_000")
    )


def test_arrays_may_be_far_apart(saved: pathlib.Path) -> None:
    names, context = list(VALUES)[1::2] + list(VALUES)[::4], array_context(True)
    numbers = [list(VALUES).index(name) for name in names]
    index: Any = asyncio.run(indexed(array_store(saved, None, True), names, numbers, context))
    for name, found in zip(names, read(index, names, context), strict=True):
        assert found.tobytes() == VALUES[name].tobytes()


def test_what_the_index_was_made_of_can_be_opened_elsewhere(saved: pathlib.Path) -> None:
    store = array_store(saved, None, True)
    index: Any = asyncio.run(indexed(store, list(VALUES), range(150), array_context(True)))
    (found,) = read(without_index(index), ["small_007"], array_context(True))
    assert found.tobytes() == VALUES["small_007"].tobytes()
    assert without_index(store) == store


def test_there_is_no_index_of_what_is_not_there(tmp_path: pathlib.Path) -> None:
    store, before = array_store(tmp_path / "absent", None, True), counters.bytes_read()
    index = asyncio.run(indexed(store, list(VALUES), range(150), array_context(True)))
    assert index is None or counters.bytes_read() == before


def test_few_arrays_need_no_index(saved: pathlib.Path) -> None:
    store = array_store(saved, None, True)
    assert asyncio.run(indexed(store, list(VALUES)[:20], range(20), array_context(True))) is None


def test_ranges_hold_runs_of_arrays() -> None:
    assert ranges(["a", "c", "b", "x"], [3, 5, 4, 9]) == [("a/", "c0"), ("x/", "x0")]
    assert ranges(["a", "a-b"], [0, 1]) == [("a-b/", "a0")]
