"""Orbax's `ArrayHandler`: its settings, its metadata, and how it reads."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Sequence
from typing import Any

import jax
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata as array_metadata_lib
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.serialization import jax_array_restore_args, serialization, tensorstore_utils

ArrayMetadataStore = array_metadata_store.Store
Format = jax_array_restore_args.Format
ShardingMetadata = sharding_metadata.ShardingMetadata


def sharding_from_text(text: str | None) -> Any:
    """The other end of `ShardingMetadata.to_serialized_string`; None for None."""
    return None if text is None else sharding_metadata.from_serialized_string(text)


def array_store(directory: Any, name: str | None, in_database: bool) -> Any:
    """TensorStore's spec for where an array of a checkpoint is stored, or all of them; a database is OCDBT."""
    return tensorstore_utils.build_kvstore_tspec(os.fspath(directory), name, use_ocdbt=in_database)


def array_context(in_database: bool) -> Any:
    """The TensorStore context that such specs need."""
    return tensorstore_utils.get_ts_context(use_ocdbt=in_database)


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
    if store is None:
        return {}
    # Every process that saved has left one, all with the same arrays: there may be thousands, and one is enough.
    listed = await store.read(checkpoint_dir=checkpoint_dir, process_index=0)
    if listed is None:
        by_process = await store.read(checkpoint_dir=checkpoint_dir) or {}
        listed = next(iter(by_process.values()), [])
    found = {}
    for metadata in listed:
        impl = (metadata.ext_metadata or {}).get(array_metadata_lib.RANDOM_KEY_IMPL, "")
        found[metadata.param_name] = SavedArray(tuple(metadata.chunk_shape), impl)
    return found


def without_array_metadata(handler: type_handlers.ArrayHandler) -> type_handlers.ArrayHandler:
    """The same handler, which reads arrays without the checkpoint's own list of them.

    `ArrayHandler.deserialize` reads the lists of all processes that saved, each time it is called. They tell it which
    arrays are typed PRNG keys.
    """
    reader = copy.copy(handler)
    reader._array_metadata_store = None
    return reader


async def read_view(
    handler: type_handlers.ArrayHandler,
    info: Any,
    arg: Any,
    sharding: Any,
    *,
    stored_shape: Sequence[int],
    transform: dict[str, Any],
    shape: Sequence[int],
) -> jax.Array:
    """What `ArrayHandler.deserialize` does for one array, for a view of it: TensorStore's JSON index transform.

    Fails if the array is not stored in the given shape: Orbax would tell only for an array read whole.
    """
    found = tensorstore_utils.build_array_read_spec(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        metadata_key=handler._metadata_key,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
        target_dtype=arg.dtype,
    )
    spec = copy.deepcopy(found.json)
    stored = spec
    while "base" in stored:
        stored = stored["base"]
    stored.setdefault("metadata", {})["shape"] = list(stored_shape)
    array, _ = await serialization.async_deserialize(
        sharding,
        {**spec, "transform": transform},
        global_shape=tuple(shape),
        dtype=arg.dtype,
        byte_limiter=info.byte_limiter,
        context=info.ts_context,
    )
    return array
