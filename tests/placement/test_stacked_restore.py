from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.meeting.session import Limits
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


@pytest.mark.parametrize(
    ("stored", "asked", "shape", "spec"),
    [
        ((8, 4, 6), (4, 6), (1, 4, 6), (None, "x")),  # only the first row is read
        ((4, 6), (8, 4, 6), (4, 6), (None,)),
    ],
    ids=["stacked-in-checkpoint", "stacked-in-target"],
)
def test_a_leaf_is_restored_as_it_is_stored(
    stored: tuple[int, ...], asked: tuple[int, ...], shape: tuple[int, ...], spec: tuple[str | None, ...]
) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    target = NamedSharding(mesh, PartitionSpec("x", None) if len(asked) == 3 else PartitionSpec("x"))
    arg = stacked_restore.StackedRestoreArgs(sharding=target, dtype=np.float32, asked_shape=asked)
    conversion = stacked_restore.conversion("w", stored, False, arg)
    assert conversion is not None
    assert not isinstance(conversion.args, stacked_restore.StackedRestoreArgs)
    assert (conversion.args.global_shape, conversion.args.dtype) == (shape, np.float32)
    assert conversion.args.sharding == NamedSharding(mesh, PartitionSpec(*spec))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    converted = conversion.convert(jax.device_put(array, conversion.args.sharding))
    assert converted.sharding == target
    assert np.asarray(converted).tolist() == np.broadcast_to(array.reshape(4, 6), asked).tolist()


@pytest.mark.parametrize(("stored", "asked"), [((4, 6), (4, 6)), ((8, 6), (4, 6)), ((4, 6), None)])
def test_other_leaves_are_not_converted(stored: tuple[int, ...], asked: tuple[int, ...] | None) -> None:
    arg = stacked_restore.StackedRestoreArgs(asked_shape=asked)
    assert stacked_restore.conversion("w", stored, False, arg) is None


def test_a_leaf_that_needs_a_conversion_needs_a_known_kind_of_sharding() -> None:
    arg = stacked_restore.StackedRestoreArgs(sharding=None, asked_shape=(6,))
    with pytest.raises(ValueError, match=r"leaf w: expected a NamedSharding or SingleDeviceSharding .* found None"):
        stacked_restore.conversion("w", (8, 6), False, arg)


async def never(*args: object) -> None:
    await asyncio.Event().wait()


def restore_one_leaf(stall: float = 60.0) -> None:
    async def fail(*args: object) -> Sequence[jax.Array]:
        raise ValueError("the shapes differ")

    arg = stacked_restore.StackedRestoreArgs(global_shape=(4,), asked_shape=(4,))
    restoring = stacked_restore.restore(mock.Mock(), Limits(stall), [mock.Mock()], [arg], fail)
    asyncio.run(asyncio.wait_for(restoring, 30))


def test_advice_about_an_error_does_not_wait_for_storage_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*args: object) -> dict[int, object]:
        return {}

    monkeypatch.setattr(stacked_restore, "_conversions", none)
    monkeypatch.setattr(stacked_restore, "_stored_shapes", never)
    monkeypatch.setattr(stacked_restore, "_ADVICE_LIMIT", 0.1)
    with pytest.raises(ValueError, match="the shapes differ"):
        restore_one_leaf()


def test_the_stored_shapes_are_not_waited_for_where_storage_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_restore, "_stored_shapes", never)
    with pytest.raises(TimeoutError, match=r"storage has not answered for 0\.1 s"):
        restore_one_leaf(stall=0.1)
