from __future__ import annotations

import asyncio
import pathlib
import threading
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Group, Leaf
from orbax_ext.plan.bundles import Sum, make_pack
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer import packing
from orbax_ext.transfer.collectives import exchange_among
from orbax_ext.transfer.executor import Executor
from tests.support import compilation_cache

pytestmark = pytest.mark.once

AXES = tuple("abcdefghij")


class CountingExchange:
    """Stands in for an exchange that was compiled and connected."""

    def __init__(self) -> None:
        self.connected = 0

    def connect(self) -> None:
        self.connected += 1


def test_exchanges_are_kept_for_a_whole_restore_however_many_there_are() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
    executor = Executor(type_handlers.ArrayHandler(), Request((), (mesh,), ()), (), limit=10)
    groups = [Group(0, (axis,), (), 0) for axis in AXES]
    made: list[CountingExchange] = []

    def exchange_among(replicas: Any) -> CountingExchange:
        made.append(CountingExchange())
        return made[-1]

    with mock.patch("orbax_ext.transfer.executor.exchange_among", exchange_among):
        for _ in range(2):
            asyncio.run(executor.connect(groups))

    assert [exchange.connected for exchange in made] == [2] * len(AXES)


def test_what_a_share_has_is_known_without_memory_for_it() -> None:
    devices = jax.devices()[:1]
    mesh = Mesh(np.array(devices), ("dp",))
    leaves = [Leaf(f"{number}", (1024,), "float32", 4, (1024,), 0) for number in range(5000)]
    sharding = NamedSharding(mesh, PartitionSpec())
    request = Request(tuple(LeafRequest(None, None, leaf, sharding) for leaf in leaves), (mesh,), ())
    executor = Executor(type_handlers.ArrayHandler(), request, leaves, limit=10)
    pack = make_pack((tuple(range(5000)),), {number: leaf.block_bytes for number, leaf in enumerate(leaves)})
    with mock.patch.object(packing, "Vectors") as vectors:
        group = Group(0, ("dp",), (pack,), 0)
        assert executor.share_bytes(group) == 5000 * 4096
        assert [item.buffers for item in executor.items(group)] == [None] * 5000  # to read ahead into host memory
        with mock.patch.object(executor, "_carriers") as carriers:
            assert executor.share_bytes(Group(0, ("dp",), (pack,), 0)) == 5000 * 4096
        assert not carriers.called  # it is asked for several times for each group
    assert not vectors.called


def test_a_process_whose_contribution_can_not_be_made_takes_part_all_the_same() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    executor = Executor(type_handlers.ArrayHandler(), Request((), (mesh,), ()), (), limit=10)
    exchange = mock.Mock()

    async def start() -> None:
        await executor.start_exchange(Group(0, ("dp",), (), 0), None)

    with (
        mock.patch("orbax_ext.transfer.executor.exchange_among", return_value=exchange),
        mock.patch.object(Executor, "_zeros", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        asyncio.run(start())
    exchange.take_part.assert_called_once_with(())
    assert not exchange.run.called


def test_an_exchange_that_is_given_up_at_once_takes_place() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    executor = Executor(type_handlers.ArrayHandler(), Request((), (mesh,), ()), (), limit=10)
    exchange = mock.Mock()
    ran = threading.Event()

    def run(*_: Any) -> list[Any]:
        ran.set()
        return []

    exchange.run.side_effect = run

    async def start() -> None:
        executor.start_exchange(Group(0, ("dp",), (), 0), []).cancel()

    with mock.patch("orbax_ext.transfer.executor.exchange_among", return_value=exchange):
        asyncio.run(start())
        assert ran.wait(30)


def test_the_persistent_cache_of_jax_keeps_the_programs_of_a_restore(tmp_path: pathlib.Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    leaf = Leaf("leaf", (1234,), "float32", 4, (1234,), 0)
    request = Request((LeafRequest(None, None, leaf, NamedSharding(mesh, PartitionSpec())),), (mesh,), ())
    executor = Executor(type_handlers.ArrayHandler(), request, [leaf], limit=10)
    exchange_among.cache_clear()
    with compilation_cache.of_a_user(tmp_path):
        executor.compile_now([Group(0, ("dp",), (Sum(0, 0),), 0)])
    assert len(list(tmp_path.glob("*-cache"))) >= 2  # to connect, and the sum
