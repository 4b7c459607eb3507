from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers

import orbax_ext
from orbax_ext import registration
from orbax_ext.options import Options
from orbax_ext.upstream import object_stores, stock_handlers, v1_contexts
from tests.support import states


def current() -> type_handlers.TypeHandler:
    return type_handlers.get_type_handler(jax.Array)


HOOKS = (*registration.hooks(), v1_contexts.CREATE_HANDLER, *object_stores.HOOKS)


@pytest.fixture(autouse=True)
def _everything_is_put_back() -> Iterator[None]:
    """Compares every function of Orbax and etils that is ever replaced, and the registered handler."""

    def hooked() -> list[Any]:
        return [current(), *(hook.owner.__dict__[hook.name] for hook in HOOKS)]

    before = hooked()
    yield
    assert all(new is old for new, old in zip(hooked(), before, strict=True))


def served(stock: type_handlers.SingleReplicaArrayHandler) -> Options | None:
    """Returns the options of the handler that restores in place of a stock one; None if that restores itself."""
    ours = registration._handler_for_stock(stock)
    return None if ours is None else ours.options


def test_register_and_unregister_nest() -> None:
    stock = current()
    outer = orbax_ext.register(replica_axis="dp")
    assert current() is outer
    inner = orbax_ext.register(replica_axis="fsdp")
    assert current() is inner
    orbax_ext.unregister()
    assert current() is outer
    orbax_ext.unregister()
    assert current() is stock


def test_unregister_without_register_is_an_error() -> None:
    with pytest.raises(ValueError, match="not registered"):
        orbax_ext.unregister()


def test_registered_restores_the_previous_handler_after_an_exception() -> None:
    stock = current()
    with pytest.raises(RuntimeError), orbax_ext.registered():  # noqa: PT012
        orbax_ext.register()  # never unregistered
        raise RuntimeError
    assert current() is stock
    with pytest.raises(ValueError, match="not registered"):
        orbax_ext.unregister()


def test_a_bad_knob_leaves_the_registry_alone() -> None:
    stock = current()
    with pytest.raises(ValueError, match="strategy"):
        orbax_ext.register(strategy="fast")  # type: ignore[arg-type]
    assert current() is stock


def test_the_new_handler_keeps_the_settings_for_saving() -> None:
    stock = current()
    store = stock._array_metadata_store
    mine = type_handlers.ArrayHandler(metadata_key=".zmeta", use_replica_parallel=False, array_metadata_store=store)
    type_handlers.register_type_handler(jax.Array, mine, override=True)
    try:
        with orbax_ext.registered() as handler:
            assert handler._metadata_key == ".zmeta"
            assert handler._use_replica_parallel is False
            assert handler._array_metadata_store is store
    finally:
        type_handlers.register_type_handler(jax.Array, stock, override=True)


def test_the_handler_takes_the_arguments_of_the_stock_one() -> None:
    handler = orbax_ext.BroadcastArrayHandler(1, 2, 3, 0.5)
    assert isinstance(handler, type_handlers.SingleReplicaArrayHandler)
    assert handler.options == Options(
        replica_axis_index=1,
        primary_replica_id=2,
        broadcast_memory_limit_bytes=3,
        broadcast_memory_scaling_factor=0.5,
    )
    assert (handler.replica_axis_index, handler.primary_replica_id) == (1, 2)


def test_too_many_or_repeated_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="at most 4 positional arguments; found 5"):
        orbax_ext.BroadcastArrayHandler(1, 2, 3, 0.5, 6)
    with pytest.raises(TypeError, match="multiple values for replica_axis_index"):
        orbax_ext.BroadcastArrayHandler(1, replica_axis_index=1)


@pytest.mark.core
def test_registering_logs_no_warning_about_overriding() -> None:
    with states.logged() as lines:
        orbax_ext.register()
        orbax_ext.unregister()
        with orbax_ext.registered():
            pass
        assert [line for line in lines if "overriding" in line] == []
        type_handlers.register_type_handler(jax.Array, current(), override=True)
        assert "overriding" in lines[-1]  # Orbax warns when others replace a handler


def test_restore_args_have_the_shapes_dtypes_and_shardings_of_the_abstract_tree() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        "array": jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding),
        "numpy": np.zeros(3),
        "number": 7,
    }
    args = orbax_ext.restore_args(abstract)
    assert isinstance(args["array"], type_handlers.SingleReplicaArrayRestoreArgs)
    assert args["array"].sharding == sharding
    assert args["array"].global_shape == (4,)
    assert args["array"].dtype == np.float32
    assert args["numpy"].restore_type is np.ndarray
    assert not isinstance(args["number"], type_handlers.ArrayRestoreArgs)


def test_a_restore_without_restore_args_is_refused() -> None:
    handler = orbax_ext.BroadcastArrayHandler()
    with pytest.raises(ValueError, match="ArrayRestoreArgs"):
        asyncio.run(handler.deserialize([], None))


def test_pytree_handler_leaves_the_global_registry_alone() -> None:
    stock = current()
    assert isinstance(orbax_ext.pytree_handler(replica_axis="dp", use_ocdbt=False), ocp.PyTreeCheckpointHandler)
    assert current() is stock


def test_no_other_functions_are_hooked_than_those_that_are_listed() -> None:
    expected = {(hook.owner, hook.name) for hook in registration.hooks()}
    before = {(hook.owner, hook.name): hook.owner.__dict__[hook.name] for hook in HOOKS}
    with orbax_ext.registered():
        changed = {key for key, old in before.items() if key[0].__dict__[key[1]] is not old}
    assert changed == expected


def test_settings_of_a_stock_handler_count_where_no_knob_is_given() -> None:
    stock = type_handlers.SingleReplicaArrayHandler(1, 2, 3, 0.5)
    assert served(stock) is None  # not registered
    with orbax_ext.registered(strategy="single", broadcast_memory_limit_bytes=7):
        assert served(stock) == Options(
            replica_axis_index=1,
            primary_replica_id=2,
            broadcast_memory_limit_bytes=7,
            broadcast_memory_scaling_factor=0.5,
            strategy="single",
        )
        with orbax_ext.registered(replica_axis="dp"):
            options = served(stock)
            assert options is not None
            assert (options.axes, options.strategy) == (("dp",), "auto")


def test_our_own_handlers_are_not_served_by_another_one() -> None:
    with orbax_ext.registered():
        assert served(orbax_ext.BroadcastArrayHandler()) is None


def test_a_stock_handler_can_save_while_orbax_ext_is_registered() -> None:
    """Without a store for the metadata of arrays its next save fails: "No ArrayMetadata found"."""
    stock, private = (type_handlers.SingleReplicaArrayHandler() for _ in range(2))
    with orbax_ext.registered() as ours:
        type_handlers.register_type_handler(jax.Array, stock, override=True)
        assert served(stock) is not None
        assert stock._array_metadata_store is ours._array_metadata_store
        assert served(private) is not None
        assert private._array_metadata_store is None
    assert stock._array_metadata_store is None


def test_the_stock_function_is_replaced_by_one_with_the_same_parameters() -> None:
    function = stock_handlers.FUNCTION
    names = list(inspect.signature(function.owner.__dict__[function.name]).parameters)
    with orbax_ext.registered():
        replacement = function.owner.__dict__[function.name]
        assert list(inspect.signature(replacement, follow_wrapped=False).parameters) == names
