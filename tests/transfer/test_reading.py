"""Slices are read as TensorStore's index transforms; blocks are placed and handed over with few calls of JAX."""

from __future__ import annotations

from unittest import mock

import jax
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_ext.plan import Leaf, Slice
from orbax_ext.request import LeafRequest
from orbax_ext.transfer.reading import _index_transform, hand_over, placed
from orbax_ext.upstream import runtime

pytestmark = pytest.mark.once


@pytest.mark.parametrize("block", [(12, 4), (6, 4), (3, 2)], ids=["one block", "two blocks", "eight blocks"])
@pytest.mark.parametrize("rows", [(0, 1), (1, 2), (0, 3)])
def test_a_slice_has_the_same_rows_of_every_block(block: tuple[int, int], rows: tuple[int, int]) -> None:
    values = np.arange(48).reshape(12, 4)
    whole = Leaf("w", (12, 4), "int64", 8, block)
    start, size = rows
    leaf = whole.sliced(Slice(0, 0, start, size))

    view = ts.open(
        {"driver": "array", "dtype": "int64", "array": values.tolist(), "transform": _index_transform(whole, leaf)}
    ).result()

    expected = [values[first + start : first + start + size] for first in range(0, 12, block[0])]
    assert np.array_equal(view.read().result(), np.concatenate(expected))


def test_all_blocks_of_a_group_are_placed_with_one_call() -> None:
    device = jax.local_devices()[0]
    values = [np.full(3, number, np.float32) for number in range(100)]
    with mock.patch.object(jax, "device_put", wraps=jax.device_put) as put:
        blocks = placed([{device: value} for value in values])
    assert put.call_count == 1
    assert [block[device].tolist() for block in blocks] == [value.tolist() for value in values]


def test_a_leaf_on_the_host_is_handed_over_with_one_call() -> None:
    devices = jax.local_devices()
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
    request = LeafRequest(None, None, Leaf("w", (3,), "float32", 4, (3,), 0), sharding)
    with mock.patch.object(runtime, "put_blocks", wraps=runtime.put_blocks) as made:
        array = hand_over(request, dict.fromkeys(devices, np.arange(3, dtype=np.float32)))
    assert made.call_count == 1
    assert array.tolist() == [0, 1, 2]
