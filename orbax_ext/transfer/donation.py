"""Arrays whose memory a step that donates them can use again (jax #18617)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from orbax_ext.transfer import boxes


def donatable(array: jax.Array) -> jax.Array:
    """Returns an array that Orbax has read, or a copy of it if JAX may have taken memory of numpy as it is.

    JAX's CPU backend does that wherever an address suits it, which is so for one small array of several.
    """
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(donatable(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    parts: Sequence[jax.Array] = [shard.data for shard in array.addressable_shards]
    if not any(map(_may_be_of_numpy, parts)):
        return array
    copies = [jax.device_put(elsewhere(np.asarray(part)), part.sharding) for part in parts]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies, dtype=array.dtype)


def _may_be_of_numpy(part: jax.Array) -> bool:
    (device,) = part.devices()
    return device.platform == "cpu" and part.size > 0 and boxes.is_aligned(part.unsafe_buffer_pointer())


def elsewhere(block: np.ndarray) -> np.ndarray:
    """Returns a copy of a block at an address that JAX copies from."""
    copy = boxes.unaligned_empty(block.shape, block.dtype)
    copy[...] = block
    return copy
