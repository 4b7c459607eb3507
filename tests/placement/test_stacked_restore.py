from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.placement import stacked_restore


@pytest.mark.parametrize(
    ("shape", "one", "expected"),
    [((8, 3), (3,), True), ((8,), (), True), ((3,), (8, 3), False), ((8, 3), (4,), False), ((3,), (3,), False)],
)
def test_a_stacked_shape_has_one_more_leading_axis(
    shape: tuple[int, ...], one: tuple[int, ...], expected: bool
) -> None:
    assert stacked_restore.is_stacked(shape, one) is expected


def test_advice_is_given_for_a_leading_axis_on_either_side() -> None:
    assert "(8, 3) in the checkpoint, (3,) asked for" in stacked_restore.advice(
        {"w": ((8, 3), (3,)), "b": ((3,), (3,))}
    )
    assert "leaf w and 1 more differ" in stacked_restore.advice({"w": ((3,), (8, 3)), "b": ((), (8,))})


def test_no_advice_is_given_for_other_mismatches() -> None:
    assert stacked_restore.advice({"w": ((4, 3), (8, 3)), "b": ((3,), (3,))}) == ""


def test_leaves_without_a_sharding_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"leaf layer/w: expected a jax\.ShapeDtypeStruct with a sharding, found one without"
    ):
        orbax_ext.restore_args({"layer": {"w": jax.ShapeDtypeStruct((2,), np.float32)}}, stacked=True)


def test_args_keep_the_shape_asked_for_of_keys_too() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    key = jax.eval_shape(lambda: jax.random.key(0))
    tree = {"key": jax.ShapeDtypeStruct((), key.dtype, sharding=sharding), "n": 3}
    args = orbax_ext.restore_args(tree, stacked=True)
    assert args["key"].asked_shape == ()
    assert not isinstance(args["n"], stacked_restore.StackedRestoreArgs)
    assert not isinstance(orbax_ext.restore_args(tree)["key"], stacked_restore.StackedRestoreArgs)
