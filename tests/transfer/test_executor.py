from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Group, Leaf
from orbax_ext.plan.bundles import make_pack
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer import packing
from orbax_ext.transfer.executor import Executor

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


def test_the_bytes_of_a_share_are_counted_without_memory_for_it() -> None:
    devices = jax.devices()[:1]
    mesh = Mesh(np.array(devices), ("dp",))
    leaves = [Leaf(f"{number}", (1024,), "float32", 4, (1024,), 0) for number in range(5000)]
    sharding = NamedSharding(mesh, PartitionSpec())
    request = Request(tuple(LeafRequest(None, None, leaf, sharding) for leaf in leaves), (mesh,), ())
    executor = Executor(type_handlers.ArrayHandler(), request, leaves, limit=10)
    pack = make_pack((tuple(range(5000)),), {number: leaf.block_bytes for number, leaf in enumerate(leaves)})
    with mock.patch.object(packing, "Vectors") as vectors:
        assert executor.share_bytes(Group(0, ("dp",), (pack,), 0)) == 5000 * 4096
    assert not vectors.called
