from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from orbax_ext.storage import array_metadata
from orbax_ext.storage.array_metadata import ArrayMetadata
from orbax_ext.upstream.array_handler import ShardingMetadata


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", None])
def test_metadata_survives_json(dtype: str | None) -> None:
    mesh = jax.make_mesh((1,), ("dp",))
    sharding = ShardingMetadata.from_jax_sharding(NamedSharding(mesh, PartitionSpec("dp", None)))
    metadata = ArrayMetadata((4, 6), None if dtype is None else jax.numpy.dtype(dtype), sharding)
    data = json.loads(json.dumps(array_metadata.to_json(metadata)))
    assert array_metadata.from_json(data) == metadata


def test_metadata_without_a_sharding_survives_json() -> None:
    metadata = ArrayMetadata((np.int64(3),), np.dtype("int8"), None)  # type: ignore[arg-type]
    assert array_metadata.from_json(json.loads(json.dumps(array_metadata.to_json(metadata)))) == metadata
