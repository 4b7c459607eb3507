from __future__ import annotations

import asyncio

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers

import orbax_ext
from orbax_ext.options import Options
from tests.support import states


def current() -> type_handlers.TypeHandler:
    return type_handlers.get_type_handler(jax.Array)


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
