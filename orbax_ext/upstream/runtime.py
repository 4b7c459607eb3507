"""JAX's runtime: the coordination service, and corners of arrays and dtypes that have no public name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array as array_lib
from jax._src import core, distributed
from jax._src.lib import _jax
from orbax.checkpoint._src.multihost import multihost

sync_global_processes = multihost.sync_global_processes


def coordination_client() -> Any:
    """JAX's client of the coordination service, or None in a job of one process that never called initialize."""
    return distributed.global_state.client


def place_in_job() -> tuple[int, int]:
    """Index of this process and number of all as far as `jax.distributed` knows, also while it waits for the others."""
    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1


def start_coordination_service(address: str, clients: int) -> Any:
    """A coordination service of its own, without devices; shut it down after its clients."""
    return _jax.get_distributed_runtime_service(address, clients)


def join_coordination_service(address: str, number: int, seconds: int) -> Any:
    """A client of such a service; returns when it is connected."""
    client = _jax.get_distributed_runtime_client(address, number, init_timeout=seconds, shutdown_on_destruction=False)
    client.connect()
    return client


def join_arrays(
    shape: tuple[int, ...], dtype: Any, sharding: Any, arrays: Any, *, weak_type: bool = False
) -> jax.Array:
    """A global array of these single-device arrays, one for each of this process's devices. Nothing is copied.

    The public function forgets that a dtype is weak, in every supported release; device_put does not.
    """
    joined = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    if not weak_type:
        return joined
    aval = joined.aval.update(weak_type=True)
    return array_lib.ArrayImpl(aval, sharding, list(arrays), committed=True)


def is_jax_dtype(dtype: Any) -> bool:
    """Whether JAX has arrays of this dtype; not of strings, objects or dates."""
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.bool_, np.number))


def tracing() -> bool:
    """Whether a function is being traced, as inside jit."""
    return not core.trace_state_clean()


def bits(dtype: Any) -> int:
    """The bits of one element; a bool takes a byte."""
    if dtype == jnp.bool_:
        return 8
    return int(jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits)
