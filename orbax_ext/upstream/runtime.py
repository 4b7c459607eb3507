"""JAX's runtime: the coordination service, and properties of arrays and dtypes that JAX has no public function for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array as array_lib
from jax._src import config, core, distributed
from jax._src.interpreters import pxla
from jax._src.lib import _jax
from orbax.checkpoint._src.multihost import multihost

sync_global_processes = multihost.sync_global_processes


def coordination_client() -> Any:
    """Returns JAX's client of the coordination service.

    It is None in a job of one process that never called `jax.distributed.initialize`.
    """
    return distributed.global_state.client


def place_in_job() -> tuple[int, int]:
    """Returns this process's index and the number of processes, without waiting for the others to connect."""
    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1


def start_coordination_service(address: str, clients: int) -> Any:
    """Starts a separate coordination service, without devices. Shut it down after its clients."""
    return _jax.get_distributed_runtime_service(address, clients)


def join_coordination_service(address: str, number: int, seconds: int) -> Any:
    """Returns a client that is connected to such a service."""
    client = _jax.get_distributed_runtime_client(address, number, init_timeout=seconds, shutdown_on_destruction=False)
    client.connect()
    return client


def join_arrays(
    shape: tuple[int, ...], dtype: Any, sharding: Any, arrays: Any, *, weak_type: bool = False
) -> jax.Array:
    """Returns the global array made of these single-device arrays, one per device of this process. Copies nothing.

    The public function loses the weak type, in every supported release; `device_put` keeps it.
    """
    joined = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    if not weak_type:
        return joined
    aval = joined.aval.update(weak_type=True)
    return array_lib.ArrayImpl(aval, sharding, list(arrays), committed=True)


def put_blocks(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, blocks: Mapping[jax.Device, np.ndarray]
) -> jax.Array:
    """Returns the array that the blocks of this process's devices make. They are copied to their devices.

    `jax.make_array_from_callback` ends in the same call, and looks up and checks for each array what the blocks of
    thousands of small arrays have in common.
    """
    devices, block = _places(shape, sharding)
    parts = [blocks[device].reshape(block) for device in devices]
    made: jax.Array = pxla.batched_device_put(_aval(shape, parts[0].dtype, sharding), sharding, parts, devices)
    return made


@functools.lru_cache(maxsize=256)
def _places(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[list[jax.Device], tuple[int, ...]]:
    return list(sharding.addressable_devices_indices_map(shape)), sharding.shard_shape(shape)


@functools.lru_cache(maxsize=256)
def _aval(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    return core.update_aval_with_sharding(core.ShapedArray(shape, dtype), sharding)


def every_program_cached() -> contextlib.AbstractContextManager[None]:
    """Lets JAX's persistent cache, if the user has one, keep all that this thread compiles in a `with` block.

    JAX keeps only what took a second or more to compile, which a restore's programs do not; all of them together may.
    """
    lowest: contextlib.AbstractContextManager[None] = config.persistent_cache_min_compile_time_secs(0.0)
    return lowest


def tracing() -> bool:
    """Returns whether a function is being traced, as inside jit."""
    return not core.trace_state_clean()


@functools.lru_cache(maxsize=256)
def bits(dtype: Any) -> int:
    """Returns the bits of one element; a bool takes a byte."""
    if dtype == jnp.bool_:
        return 8
    return int(jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits)


def settings_of_thread() -> Callable[[], None]:
    """Returns a function that gives another thread the JAX settings that this thread has for itself.

    Such settings are the mesh of `jax.set_mesh` and what `with jax.enable_x64(True)` and its like have set.
    """
    mine = {
        name: (setting, setting.get_local())
        for name, setting in vars(config).items()
        if isinstance(setting, config.config_ext.Config) and name not in _OF_TRACES
    }

    def apply() -> None:
        for setting, value in mine.values():
            if value is not config.config_ext.unset:
                setting.set_local(value)
                if hook := getattr(setting, "_update_thread_local_hook", None):
                    hook(value)

    return apply


_OF_TRACES = ("trace_state", "axis_env_state")  # not settings: what the thread is tracing
