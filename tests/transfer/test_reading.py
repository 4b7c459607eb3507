"""A slice is read as TensorStore's index transform: the same rows of every block, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import tensorstore as ts

from orbax_ext.plan import Leaf, Slice
from orbax_ext.transfer.reading import _index_transform

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
