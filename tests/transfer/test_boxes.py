"""Boxes of stored arrays arrive in the buffers bit for bit; what needs more than that is left to Orbax."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import pathlib
import weakref
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Slice
from orbax_ext.request import LeafRequest, given_request
from orbax_ext.storage import counters
from orbax_ext.transfer import again, boxes, reading
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.boxes import ReadItem
from orbax_ext.upstream.array_handler import array_context
from orbax_ext.upstream.stored_arrays import StoredSpec
from tests.support import stalling_store

VALUES = {
    "floats": np.array([[-0.0, np.nan, 1.5], [2, 3, 4]], np.float32),
    "scalar": np.array(7, np.int32),
    "flags": np.array([True, False, True]),
    "halves": np.array([0x7FC1, 0x8000, 0x3F80], np.uint16).view(jnp.bfloat16),
}


@pytest.fixture(params=[True, False], ids=["ocdbt", "files"])
def stored(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> tuple[pathlib.Path, bool]:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=request.param)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave({n: jnp.asarray(v) for n, v in VALUES.items()}))
    return tmp_path / "step", request.param


def items(stored: tuple[pathlib.Path, bool], **changed: Any) -> list[ReadItem]:
    path, in_database = stored
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P())
    infos, args = [], []
    for name, value in VALUES.items():
        infos.append(
            type_handlers.ParamInfo(
                name=name,
                parent_dir=epath.Path(path),
                is_ocdbt_checkpoint=in_database,
                use_zarr3=False,
                ts_context=array_context(in_database),
            )
        )
        shape, dtype = changed.get(name, (value.shape, value.dtype))
        args.append(type_handlers.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype))
    requests = given_request(infos, args).leaf_requests
    return [_item(index, request) for index, request in enumerate(requests)]


def _item(index: int, request: LeafRequest) -> ReadItem:
    leaf = request.leaf
    return ReadItem(index, request, leaf, request.sharding, Block(leaf.block, jnp.dtype(leaf.dtype)))


def test_what_is_stored_arrives_bit_for_bit(stored: tuple[pathlib.Path, bool]) -> None:
    found = asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), items(stored)))
    for index, value in enumerate(VALUES.values()):
        (block,) = found[index].values()
        assert (block.dtype, block.tobytes()) == (value.dtype, value.tobytes())
        assert block.ctypes.data % 64 == 0


def test_a_leaf_is_read_into_the_buffer_that_is_given(stored: tuple[pathlib.Path, bool]) -> None:
    given = items(stored)[0]
    buffer = np.zeros((2, 3), np.float32)
    item = ReadItem(given.index, given.request, given.leaf, given.sharding, given.block, {jax.devices()[0]: buffer})
    found = asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), [item]))
    assert found[0][jax.devices()[0]] is buffer
    assert buffer.tobytes() == VALUES["floats"].tobytes()


@pytest.mark.parametrize("given", [False, True], ids=["new memory", "given buffers"])
def test_a_small_array_is_read_once_for_all_its_boxes(
    stored: tuple[pathlib.Path, bool], given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves: dict[Any, tuple[Any, ...]] = {((0, 1), (0, 3)): ("a", "b"), ((1, 2), (0, 3)): ("c",)}  # of devices
    monkeypatch.setattr(boxes, "_on_devices", lambda sharding, shape: tuple(halves.items()))
    buffers: dict[Any, Any] = {device: np.zeros((1, 3), np.float32) for device in "abc"}
    (whole, *_) = items(stored)
    block = Block((1, 3), jnp.dtype(np.float32))
    item = dataclasses.replace(whole, block=block, buffers=buffers if given else None)
    with mock.patch.object(boxes, "_BoxRead") as box_read:
        found: Any = asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), [item]))[0]
    assert not box_read.called
    for device, row in {"a": 0, "b": 0, "c": 1}.items():
        assert found[device].tobytes() == VALUES["floats"][row].tobytes()
        assert (found[device] is buffers[device]) == given


def test_boxes_are_read_one_by_one_where_others_have_the_rest(
    stored: tuple[pathlib.Path, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {((0, 2), (0, 1)): ("a",), ((0, 2), (1, 2)): ("b",)}
    monkeypatch.setattr(boxes, "_on_devices", lambda sharding, shape: tuple(columns.items()))
    item = dataclasses.replace(items(stored)[0], block=Block((2, 1), jnp.dtype(np.float32)))
    with mock.patch.object(boxes, "_ArrayRead") as array_read:
        found: Any = asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), [item]))[0]
    assert not array_read.called
    assert [found[device].tobytes() for device in "ab"] == [VALUES["floats"][:, at].tobytes() for at in (0, 1)]


def test_a_slice_is_read_from_its_rows(stored: tuple[pathlib.Path, bool]) -> None:
    whole = items(stored)[0]
    leaf = whole.leaf.sliced(Slice(0, 1, 1, 2))
    item = ReadItem(0, whole.request, leaf, whole.sharding, Block(leaf.block, jnp.dtype(leaf.dtype)))
    ((block,),) = (found.values() for found in asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), [item])).values())
    assert block.tobytes() == VALUES["floats"][:, 1:3].tobytes()


def test_a_box_that_is_named_is_read_for_its_devices(stored: tuple[pathlib.Path, bool]) -> None:
    whole, devices = items(stored)[0], tuple(jax.devices()[:1])
    block = Block((1, 3), whole.block.dtype)
    item = ReadItem(0, whole.request, whole.leaf, whole.sharding, block, boxes=((((1, 2), (0, 3)), devices),))
    found = asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), [item]))
    assert list(found[0]) == list(devices)
    assert found[0][devices[0]].tobytes() == VALUES["floats"][1:].tobytes()


def test_casts_and_other_shapes_are_left_to_orbax(stored: tuple[pathlib.Path, bool]) -> None:
    changed = items(stored, floats=((2, 3), np.dtype(np.float16)), flags=((5,), np.dtype(bool)))
    assert sorted(asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), changed))) == [1, 3]


def test_an_array_that_is_not_there_raises_the_error_of_orbax(stored: tuple[pathlib.Path, bool]) -> None:
    item = items(stored)[0]
    item.request.info.name = "nowhere"
    handler = type_handlers.ArrayHandler(array_metadata_store=None)
    with pytest.raises((ValueError, FileNotFoundError)) as ours:
        asyncio.run(reading.read_blocks(handler, [item]))
    with pytest.raises((ValueError, FileNotFoundError)) as plain:
        asyncio.run(handler.deserialize([item.request.info], [item.request.arg]))
    assert type(ours.value) is type(plain.value)


def test_memory_is_used_again_after_it_was_given_back() -> None:
    memory = boxes.UsedMemory()
    block = memory.empty((4, 8), np.float32)
    assert memory.empty((4, 8), np.float32).ctypes.data != block.ctypes.data
    assert block.ctypes.data % 64 == 8  # JAX copies from there
    memory.give_back([block, block])  # two devices hold the same
    again = memory.empty((64,), np.int16)
    assert (again.ctypes.data, again.shape) == (block.ctypes.data, (64,))
    assert memory.empty((64,), np.int16).ctypes.data != block.ctypes.data


@pytest.mark.parametrize("in_database", [True, False], ids=["ocdbt", "files"])
def test_a_chunk_that_storage_does_not_send_is_asked_for_once_more(
    tmp_path: pathlib.Path, in_database: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = np.random.default_rng(0).integers(0, 1000, (64, 256), np.int32)
    monkeypatch.setattr(again, "_FLOOR", 0.2)
    monkeypatch.setattr(again, "_LOOK_EVERY", 0.05)
    monkeypatch.setitem(again._paces, "", collections.deque([1e-9]))  # an earlier read has shown how fast storage is
    asked = counters.bytes_again()
    written = {"dtype": "<i4", "shape": [64, 256], "chunks": [32, 256], "compressor": None}
    kvstore = {"driver": "file", "path": f"{tmp_path}/"}
    ts.open(_spec(kvstore, in_database) | {"metadata": written}, create=True).result().write(value).result()
    with stalling_store.serving(tmp_path) as store:
        kvstore = {"driver": "http", "base_url": store.url, "path": "/"}
        item = _slice_of(StoredSpec("leaf", _spec(kvstore, in_database), array_context(in_database), ""), value)
        found = asyncio.run(asyncio.wait_for(boxes.fetch(type_handlers.ArrayHandler(), [item]), 30))
        (block,) = found[0].values()
        assert block.tobytes() == value[32:].tobytes()
        assert len(store.chunks) == 2
        assert len(set(store.chunks)) == 1
    assert counters.bytes_again() - asked == block.nbytes


def _spec(kvstore: dict[str, Any], in_database: bool) -> dict[str, Any]:
    database = {"driver": "ocdbt", "base": kvstore, "path": "leaf/"}
    return {"driver": "zarr", "kvstore": database if in_database else kvstore}


def _slice_of(info: StoredSpec, value: np.ndarray) -> ReadItem:
    """Returns what reads the second half of an array."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P())
    args = type_handlers.ArrayRestoreArgs(sharding=sharding, global_shape=value.shape, dtype=value.dtype)
    (whole,) = given_request([info], [args]).leaf_requests
    half = whole.leaf.sliced(Slice(0, 0, 32, 32))
    return ReadItem(0, whole, half, sharding, Block(half.block, jnp.dtype(value.dtype)))


def test_memory_is_used_again_until_nothing_is_kept() -> None:
    memory = boxes.UsedMemory()

    def read() -> np.ndarray:
        return memory.empty((1000,), np.float32)

    first = read()
    memory.give_back([first])
    second = read()
    assert second.ctypes.data == first.ctypes.data
    memory.keep_nothing()
    freed = weakref.ref(second.base)
    memory.give_back([second])  # by a read that was under way
    del first, second
    assert freed() is None


def test_chunks_of_small_arrays_are_read_with_few_requests(tmp_path: pathlib.Path) -> None:
    """Each chunk that is asked for alone costs a request to storage."""
    values = {f"small_{number:03}": np.arange(number, number + 64, dtype=np.int32) for number in range(100)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        state = {name: jnp.asarray(value) for name, value in values.items()}
        save_args = {name: ocp.SaveArgs(chunk_byte_size=64) for name in values}  # four chunks
        checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave(state, save_args))
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P())
    infos = [
        type_handlers.ParamInfo(
            name=name,
            parent_dir=epath.Path(tmp_path / "step"),
            is_ocdbt_checkpoint=True,
            use_zarr3=False,
            ts_context=context,
        )
        for context in [array_context(True)]
        for name in values
    ]
    args = [ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(64,), dtype=np.int32) for _ in values]
    wanted = given_request(infos, args).leaf_requests
    block = Block((64,), jnp.dtype(np.int32))
    reads = [ReadItem(at, request, request.leaf, sharding, block) for at, request in enumerate(wanted)]
    before = counters.requests()

    found = asyncio.run(boxes.fetch(type_handlers.ArrayHandler(), reads))

    assert counters.requests() - before < len(values)
    for at, value in enumerate(values.values()):
        (block_there,) = found[at].values()
        assert block_there.tobytes() == value.tobytes()
