"""Every difference between releases of Orbax and JAX, and everything private of theirs that we touch.

No other module imports from `orbax.checkpoint._src`, `orbax.checkpoint.experimental.v1._src` or `jax._src`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import array as array_lib
from jax._src import core, distributed
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata as array_metadata_lib
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import jax_array_restore_args
from orbax.checkpoint.experimental.v1._src.context import context as v1_context
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler as v1_array_leaf_handler

ArrayMetadataStore = array_metadata_store.Store
Format = jax_array_restore_args.Format
ShardingMetadata = sharding_metadata.ShardingMetadata
sync_global_processes = multihost.sync_global_processes


def coordination_client() -> Any:
    """JAX's client of the coordination service, or None in a job of one process that never called initialize."""
    return distributed.global_state.client


def array_handler_parameters() -> tuple[str, ...]:
    """The names of ArrayHandler's keyword arguments in this release."""
    return tuple(inspect.signature(type_handlers.ArrayHandler).parameters)


def array_handler_settings(handler: type_handlers.ArrayHandler) -> dict[str, Any]:
    """The keyword arguments that would make an ArrayHandler with the same settings as this one.

    ArrayHandler keeps each argument in an attribute of the same name with an underscore, in every supported release.
    """
    return {name: getattr(handler, f"_{name}") for name in array_handler_parameters() if hasattr(handler, f"_{name}")}


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """What the checkpoint's own list of arrays says of one of them."""

    chunk: tuple[int, ...]
    key_impl: str  # of a typed PRNG key; empty for all else


async def saved_arrays(handler: type_handlers.ArrayHandler, checkpoint_dir: Any) -> dict[str, SavedArray]:
    """The list of arrays that Orbax keeps in a checkpoint, by leaf name; empty if it has none."""
    store = handler._array_metadata_store
    by_process = await store.read(checkpoint_dir=checkpoint_dir) if store is not None else None
    if not by_process:
        return {}
    found = {}
    for metadata in next(iter(by_process.values())):
        impl = (metadata.ext_metadata or {}).get(array_metadata_lib.RANDOM_KEY_IMPL, "")
        found[metadata.param_name] = SavedArray(tuple(metadata.chunk_shape), impl)
    return found


_V1_KNOBS = "_orbax_ext_knobs"
_v1_array_handler = v1_array_leaf_handler._create_v0_array_handler


def hook_v1_array_handlers(choose: Callable[[Any, type_handlers.ArrayHandler], type_handlers.ArrayHandler]) -> None:
    """Lets `choose(context, stock handler)` have the last word on the array handler of every v1 Context.

    v1 asks a function of this name for it in every supported release. Setting it again changes nothing.
    """

    def create(context: Any) -> type_handlers.ArrayHandler:
        return choose(context, _v1_array_handler(context))

    v1_array_leaf_handler._create_v0_array_handler = create


def v1_context_with(base: Any, knobs: dict[str, Any]) -> Any:
    """A v1 Context with the options of `base`, or of the active one, that carries our knobs.

    They are an attribute of its options for loading arrays: these are what a Context made from this one inherits.
    """
    derived = v1_context.Context(base if base is not None else v1_context.get_context())
    array_options = copy.copy(derived.array_options)
    loading = copy.copy(array_options.loading)
    # Options are frozen dataclasses before 0.12.0 and refuse changes while their Context is active since.
    object.__setattr__(loading, _V1_KNOBS, dict(knobs))
    object.__setattr__(array_options, "loading", loading)
    derived._array_options = array_options
    return derived


def v1_knobs(context: Any) -> dict[str, Any] | None:
    """The knobs that a v1 Context carries, or None if it is not one of ours."""
    return getattr(context.array_options.loading, _V1_KNOBS, None)


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


class LonelyClient:
    """Stands in for the coordination service's client in a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self._values:
            raise KeyError(f"NOT_FOUND: {key}")
        return self._values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self._values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        self._values = {name: value for name, value in self._values.items() if not f"{name}/".startswith(f"{key}/")}

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        return self._values[key]
