"""What makes tests faster: programs in JAX's cache that all devices of a process share."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_ext import lab


def test_devices_share_the_programs_of_one_device(tmp_path: pathlib.Path) -> None:
    with lab.Cluster(processes=2, devices=2) as pair:
        for _ in range(2):  # compiled, and read from the cache
            assert pair.run(compute_everywhere, str(tmp_path)) == [[True] * 3] * 2
    for name in ("alone", "together"):
        assert len(list(tmp_path.glob(f"jit_{name}-*-cache"))) == 2  # one for each process


# Run on the processes.


def compute_everywhere(directory: str) -> list[bool]:
    """Returns whether programs on each device of this process, and on both, compute the right result there."""
    before = jax.config.jax_compilation_cache_dir
    _use(directory)
    try:
        jax.clear_caches()
        devices = jax.local_devices()
        right = []
        for number, device in enumerate(devices):
            result = jax.jit(alone)(jax.device_put(np.arange(8.0) + number, device))
            right.append(result.devices() == {device} and np.array_equal(result, 2 * (np.arange(8.0) + number) + 1))
        both = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
        result = jax.jit(together)(jax.device_put(np.arange(8.0), both))
        return [*right, float(result) == 28 and result.devices() == {*devices}]
    finally:
        _use(before)


def alone(array: jax.Array) -> jax.Array:
    return 2 * array + 1


def together(array: jax.Array) -> jax.Array:
    return jnp.sum(array)


def _use(directory: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()
