"""Leaves that do not travel, and the memory limit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer.direct_reads import DirectReads
from orbax_ext.transfer.executor import Executor

pytestmark = pytest.mark.once

MIB = 1 << 20


def most_under_way(sizes: Sequence[int], memory_limit: int | None) -> int:
    """Returns the bytes that are being read at once of leaves of these sizes."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    sharding = NamedSharding(mesh, PartitionSpec())
    leaves = [Leaf(f"{number}", (size,), "uint8", 1, (size,), 0) for number, size in enumerate(sizes)]
    request = Request(tuple(LeafRequest(None, None, leaf, sharding) for leaf in leaves), (mesh,), ())
    executor = Executor(type_handlers.ArrayHandler(), request, leaves, limit=10, memory_limit=memory_limit)
    under_way, seen = 0, [0]

    async def read_own(self: DirectReads, indices: Sequence[int]) -> dict[int, Any]:
        nonlocal under_way
        under_way += sum(sizes[index] for index in indices)
        seen.append(under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= sum(sizes[index] for index in indices)
        return dict.fromkeys(indices)

    with mock.patch.object(DirectReads, "read_own", read_own):
        arrays = asyncio.run(executor.read_direct(range(len(sizes)), {}))
    assert sorted(arrays) == list(range(len(sizes)))
    return max(seen)


@pytest.mark.parametrize(
    ("sizes", "limit", "most"),
    [
        ([MIB] * 40, 16 * MIB, 8 * MIB),
        ([20 * MIB, 3 * MIB, *[MIB] * 10, 20 * MIB], 16 * MIB, 20 * MIB),
        ([48 * MIB] * 4, 1 << 30, 48 * MIB),
        ([16 * MIB] * 8, None, 64 * MIB),
        ([MIB] * 3, 1, MIB),
    ],
    ids=["small leaves", "a leaf above the limit", "large leaves", "no limit", "next to nothing"],
)
def test_no_more_is_read_at_once_than_half_of_the_limit_or_one_leaf(
    sizes: Sequence[int], limit: int | None, most: int
) -> None:
    assert most_under_way(sizes, limit) == most
