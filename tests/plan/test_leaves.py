from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from orbax_ext.plan import Leaf, Slice
from orbax_ext.plan.leaves import itemsize

pytestmark = pytest.mark.once


def test_a_slice_has_the_same_rows_of_every_block() -> None:
    leaf = Leaf("w", (16, 6), "int16", 2, (4, 6), 0, (("tp",), ()))
    rows = Slice(3, 0, 2, 2)
    cut = leaf.sliced(rows)
    assert (cut.shape, cut.block, cut.slice) == ((8, 6), (2, 6), rows)
    assert (leaf.block_bytes, cut.block_bytes) == (48, 24)


DTYPES = {
    "bool": 1,
    "float32": 4,
    "complex64": 8,
    "bfloat16": 2,
    "float8_e4m3b11fnuz": 1,
    "float4_e2m1fn": 1,
    "int4": 1,
}


def test_sizes_of_dtypes_are_known_without_ml_dtypes() -> None:
    script = "import sys; from orbax_ext.plan.leaves import itemsize; print(*map(itemsize, sys.argv[1:]))"
    command = [sys.executable, "-c", script + "; assert 'ml_dtypes' not in sys.modules", *DTYPES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [int(size) for size in done.stdout.split()] == list(DTYPES.values())


def test_sizes_of_dtypes_are_those_of_ml_dtypes() -> None:
    for name, kind in vars(ml_dtypes).items():
        if isinstance(kind, type) and issubclass(kind, np.generic):
            assert itemsize(name) == np.dtype(kind).itemsize


@pytest.mark.parametrize("name", ["float17", "None", "bfloat8", "float8", "key<fry>"])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a dtype such as bfloat16"):
        itemsize(name)
