"""Blocks of a local checkpoint: how they are read and placed, and what counts as damage."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import logging
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import type_handlers

from orbax_ext.plan.holders import ABSENT, Columns, LocalPlan
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request, given_request
from orbax_ext.storage.checkpoint import digest_files
from orbax_ext.transfer import boxes, local_blocks, reading
from orbax_ext.transfer.local_blocks import LocalBlocks
from orbax_ext.transfer.local_pipeline import LocalPipeline
from orbax_ext.upstream import emergency as upstream

pytestmark = pytest.mark.once

LEAVES = 40
VALUES = {f"leaf_{number}": np.full((4, 3), number, np.float32) for number in range(LEAVES - 1)} | {
    "scalar": np.array(7, np.int32)
}
NAMES = tuple(VALUES)
NOWHERE = epath.Path("/nowhere")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> epath.Path:
    path = tmp_path_factory.mktemp("local") / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave({name: jnp.asarray(value) for name, value in VALUES.items()}))
    return epath.Path(path)


@pytest.fixture
def request_of_all() -> Request:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P())
    args = [
        type_handlers.ArrayRestoreArgs(sharding=sharding, global_shape=value.shape, dtype=value.dtype)
        for value in VALUES.values()
    ]
    return given_request(upstream.param_infos(NOWHERE, NAMES), args)


def tables(request: Request) -> dict[int, Columns]:
    return {index: Columns(request.mesh_infos[leaf.mesh or 0], leaf.spec) for index, leaf in enumerate(request.leaves)}


def blocks_of(request: Request, stored: epath.Path = NOWHERE, **limits: Any) -> LocalBlocks:
    handler = type_handlers.ArrayHandler()
    return LocalBlocks(handler, request, tables(request), upstream.param_infos(stored, NAMES), 20.0, **limits)


async def look_and_load(blocks: LocalBlocks, directory: epath.Path) -> None:
    await blocks.look(directory, upstream.param_infos(directory, NAMES))
    await blocks.load(range(LEAVES), {})


def assert_loaded(blocks: LocalBlocks, leaves: Sequence[int] = range(LEAVES)) -> None:
    assert sorted(blocks.blocks) == list(leaves)
    for index in leaves:
        (block,) = blocks.blocks[index].values()
        expected = VALUES[NAMES[index]]
        assert (block.shape, block.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(np.asarray(block), expected)


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leaves each call has placed."""
    sizes: list[int] = []
    original = reading.placed

    def placed(contributions: Any) -> Any:
        sizes.append(len(contributions))
        return original(contributions)

    monkeypatch.setattr(reading, "placed", placed)
    return sizes


def test_leaves_are_read_and_placed_together(saved: epath.Path, request_of_all: Request, placements: list[int]) -> None:
    blocks = blocks_of(request_of_all)
    asyncio.run(look_and_load(blocks, saved))
    assert_loaded(blocks)
    assert placements == [LEAVES]
    assert blocks.tell_damaged() == {}


def test_large_leaves_are_read_a_few_at_a_time(
    saved: epath.Path, request_of_all: Request, placements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_blocks, "_BATCH", 16)
    monkeypatch.setattr(local_blocks, "_BATCH_BYTES", 1)
    blocks = blocks_of(request_of_all)
    asyncio.run(look_and_load(blocks, saved))
    assert_loaded(blocks)
    assert sorted(placements) == [8, 16, 16]


def test_leaves_that_can_not_be_fetched_are_read_one_by_one(
    saved: epath.Path, request_of_all: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> Any:
        raise ValueError("not all of them can be opened")

    monkeypatch.setattr(boxes, "fetch", fail)
    blocks = blocks_of(request_of_all)
    asyncio.run(look_and_load(blocks, saved))
    assert_loaded(blocks)


def test_few_leaves_at_a_time_are_compared_with_their_digests(
    saved: epath.Path, request_of_all: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def check_digest(*args: Any) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        with lock:
            under_way -= 1
        raise ValueError("another digest")

    stored = digest_files.StoredDigests(2, {name: {"digest": ""} for name in NAMES[1:]})
    monkeypatch.setattr(local_blocks, "_check_digest", check_digest)
    monkeypatch.setattr(local_blocks, "_stored_digests", lambda _: stored)
    blocks = blocks_of(request_of_all)
    asyncio.run(look_and_load(blocks, saved))
    assert 1 < most <= 4
    assert len(blocks._damaged) == LEAVES - 1
    assert_loaded(blocks, [0])
    assert blocks.loaded == {0: (0,)} | dict.fromkeys(range(1, LEAVES), (ABSENT,))
    assert set(blocks.tell_damaged()) == {"damaged"}


@pytest.mark.parametrize("error", [TimeoutError("placed did not finish"), MemoryError("no room")])
def test_what_can_not_be_placed_is_not_damaged(
    saved: epath.Path, request_of_all: Request, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr(reading, "placed", fail)
    blocks = blocks_of(request_of_all)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(look_and_load(blocks, saved))
    assert not blocks._damaged


def test_a_leaf_without_room_on_the_device_is_not_damaged(
    saved: epath.Path, request_of_all: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any) -> dict[int, Any]:
        return {}

    async def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(boxes, "fetch", nothing)
    monkeypatch.setattr(reading, "read", fail)
    blocks = blocks_of(request_of_all)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        asyncio.run(look_and_load(blocks, saved))
    assert not blocks._damaged


@pytest.mark.parametrize(
    "content",
    ["[]", "no JSON", "{}", '{"checkpoint": "HERE", "leaves": []}', '{"checkpoint": "HERE", "leaves": {"scalar": 1}}'],
)
def test_bad_digest_files_are_named_in_one_line(
    saved: epath.Path, request_of_all: Request, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    path = digest_files.path_for(saved)
    path.write_text(content.replace("HERE", digest_files.identity(saved)))
    try:
        blocks = blocks_of(request_of_all)
        asyncio.run(look_and_load(blocks, saved))
    finally:
        path.unlink()
    assert_loaded(blocks)
    (line,) = lines
    assert "the digests beside the local step" in line


def test_gaps_are_read_together_with_the_limits_of_storage(
    saved: epath.Path, request_of_all: Request, placements: list[int]
) -> None:
    limited: list[str] = []

    def with_limits(infos: Sequence[Any]) -> list[Any]:
        limited.extend(info.name for info in infos)
        return [*infos]

    blocks = blocks_of(request_of_all, saved, with_limits=with_limits)
    asyncio.run(blocks.load(range(LEAVES), {index: {0: 0} for index in range(LEAVES)}))
    assert_loaded(blocks)
    assert placements == [LEAVES]
    assert limited == list(NAMES)


def test_a_leaf_that_does_not_travel_is_complete_with_what_storage_has(
    saved: epath.Path, request_of_all: Request
) -> None:
    plan, gaps = LocalPlan(tuple(range(LEAVES)), ()), {index: {0: 0} for index in range(LEAVES)}
    blocks, recorder = blocks_of(request_of_all, saved), Recorder()
    with LocalPipeline(request_of_all, tables(request_of_all), blocks, plan, gaps, recorder, 20.0) as pipeline:
        asyncio.run(pipeline.finish())
        arrays = pipeline.hand_over(())
    for index, name in enumerate(NAMES):
        np.testing.assert_array_equal(np.asarray(arrays[index]), VALUES[name])


def test_a_damaged_leaf_is_not_read_again(saved: epath.Path, request_of_all: Request) -> None:
    async def case() -> None:
        blocks = blocks_of(request_of_all)
        await blocks.look(saved, upstream.param_infos(NOWHERE, NAMES))  # nothing can be read there
        await blocks.load([3], {})
        with pytest.raises(RuntimeError, match=f"was to be read again: {NAMES[3]} "):
            await blocks.load([3], {})

    asyncio.run(case())


def test_other_reads_end_with_the_first_error_from_storage(
    saved: epath.Path, request_of_all: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[str] = []

    async def nothing(*_: Any) -> dict[int, Any]:
        return {}

    async def read(_: Any, items: Sequence[boxes.ReadItem]) -> Any:
        if items[0].index == 3:
            raise OSError("the bucket is gone")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(items[0].leaf.name)

    monkeypatch.setattr(boxes, "fetch", nothing)
    monkeypatch.setattr(reading, "read", read)
    blocks = blocks_of(request_of_all, saved)
    with pytest.raises(OSError, match="the bucket is gone"):
        asyncio.run(blocks.load(range(5), {index: {0: 0} for index in range(5)}))
    assert sorted(cancelled) == ["leaf_0", "leaf_1", "leaf_2", "leaf_4"]
