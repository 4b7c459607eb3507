from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from orbax_ext.placement import put

TREE = {"a": [np.zeros(1), np.zeros(2)], "b": 3}


def here() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def test_a_prefix_stands_for_all_leaves_below_it() -> None:
    assert put.broadcast("shard", TREE, "x") == ["x", "x", "x"]
    assert put.broadcast("shard", TREE, {"a": "x", "b": None}) == ["x", "x", None]


def test_another_structure_is_refused() -> None:
    with pytest.raises(ValueError, match="shard: expected shardings with the structure of the tree"):
        put.broadcast("shard", TREE, {"c": "x"})


def test_only_arrays_need_a_sharding() -> None:
    assert put.targets("shard", TREE, {"a": here(), "b": None}) == [here(), here(), None]
    with pytest.raises(ValueError, match="shard: leaf a/0: expected a Sharding or something that has one, found None"):
        put.targets("shard", TREE, {"a": None, "b": None})


def test_an_array_or_an_abstract_one_stands_for_its_sharding() -> None:
    abstract = jax.ShapeDtypeStruct((1,), np.float32, sharding=here())
    assert put.sharding_of(abstract) == put.sharding_of(here()) == here()
    assert put.sharding_of(np.zeros(1)) is None
