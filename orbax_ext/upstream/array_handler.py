"""Orbax's `ArrayHandler`: its settings, the metadata that it keeps of arrays, and how it reads them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import os
from typing import Any, TypedDict

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata as array_metadata_lib
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.serialization import (
    jax_array_restore_args,
    tensorstore_utils,
    type_handler_registry,
)

ArrayMetadataStore = array_metadata_store.Store
Format = jax_array_restore_args.Format
ShardingMetadata = sharding_metadata.ShardingMetadata


class ArrayHandlerArguments(TypedDict, total=False):
    """ArrayHandler's own keyword arguments, those of all supported releases."""

    metadata_key: str | None
    primary_host: int | None
    replica_id: int | None
    use_replica_parallel: bool | None
    min_slice_bytes_for_replica_parallel: int | None
    max_replicas_for_replica_parallel: int | None
    enable_write_sharding_file: bool
    array_metadata_store: Any
    enable_replica_parallel_separate_folder: bool
    dispatcher: Any
    callback: Any  # since 0.12


class PyTreeHandlerArguments(TypedDict, total=False):
    """PyTreeCheckpointHandler's keyword arguments, those of all supported releases, without its registry."""

    aggregate_filename: str | None
    save_concurrent_gb: int | None
    restore_concurrent_gb: int | None
    save_device_host_concurrent_gb: int | str | None
    memory_limit_options: Any  # since 0.12
    use_ocdbt: bool
    use_zarr3: bool
    use_compression: bool
    multiprocessing_options: Any
    handler_impl: Any
    pytree_metadata_options: Any
    array_metadata_validator: Any
    enable_pinned_host_transfer: bool | None
    is_prioritized_key_fn: Any


def sharding_from_text(text: str | None) -> Any:
    """Parses what `ShardingMetadata.to_serialized_string` wrote; returns None for None."""
    return None if text is None else sharding_metadata.from_serialized_string(text)


def array_store(directory: Any, name: str | None, in_database: bool) -> Any:
    """Returns TensorStore's spec of the place of an array in a checkpoint, or of all arrays if `name` is None.

    `in_database` says whether the checkpoint is an OCDBT database.
    """
    return tensorstore_utils.build_kvstore_tspec(os.fspath(directory), name, use_ocdbt=in_database)


def array_context(in_database: bool) -> Any:
    """Returns the TensorStore context that such specs need."""
    return tensorstore_utils.get_ts_context(use_ocdbt=in_database)


def array_handler_parameters() -> tuple[str, ...]:
    """Returns the names of ArrayHandler's keyword arguments in this release."""
    return tuple(inspect.signature(type_handlers.ArrayHandler).parameters)


def pytree_handler_parameters() -> tuple[str, ...]:
    """Returns the names of PyTreeCheckpointHandler's keyword arguments in this release, without its registry."""
    names = inspect.signature(ocp.PyTreeCheckpointHandler).parameters
    return tuple(name for name in names if name != "type_handler_registry")


def set_array_handler(handler: type_handlers.TypeHandler) -> None:
    """Makes this the handler of `jax.Array` in Orbax's global registry.

    `type_handlers.register_type_handler` does the same, but logs a warning each time that it overrides a handler.
    """
    registry = type_handler_registry.GLOBAL_TYPE_HANDLER_REGISTRY
    registry.add(jax.Array, handler, override=True, ignore_warnings=True)


def array_handler_settings(handler: type_handlers.ArrayHandler) -> dict[str, Any]:
    """Returns the keyword arguments that make an ArrayHandler with the same settings as this one.

    ArrayHandler keeps each argument in an attribute of the same name with an underscore, in every supported release.
    """
    return {name: getattr(handler, f"_{name}") for name in array_handler_parameters() if hasattr(handler, f"_{name}")}


def uses_pathways(handler: type_handlers.ArrayHandler) -> bool:
    """Returns whether Pathways runs the handler's reads: one controller for all hosts, so no process to wait for."""
    return handler._dispatcher is not None


def lend_array_metadata_store(handler: type_handlers.ArrayHandler, lender: type_handlers.ArrayHandler) -> Any:
    """Lets a handler save with the store of another if it has none; returns a function that undoes this.

    A registered handler without a store breaks every later save: "No ArrayMetadata found".
    """
    if handler._array_metadata_store is not None:
        return lambda: None
    store = handler._array_metadata_store = lender._array_metadata_store

    def undo() -> None:
        if handler._array_metadata_store is store:
            handler._array_metadata_store = None

    return undo


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """The entry of one array in the checkpoint's own list of arrays."""

    chunk: tuple[int, ...]
    key_impl: str  # of typed PRNG keys; empty for all other arrays


async def saved_arrays(
    handler: type_handlers.ArrayHandler, checkpoint_dir: Any, also_read: slice = slice(0)
) -> dict[str, SavedArray]:
    """Returns the list of arrays that Orbax keeps in a checkpoint, by leaf name; empty if there is none.

    Every process that saved wrote a list, possibly thousands of them, all of the same arrays: the first one is enough.
    Plain Orbax reads all, and fails if one is damaged. Of the lists, `also_read` are only read, for that error.
    """
    store = handler._array_metadata_store
    if store is None:
        return {}
    resolver = store._path_resolver
    paths = sorted(await resolver.get_read_file_paths(checkpoint_dir), key=resolver.get_process_index)
    if not paths:
        await store.read(checkpoint_dir=checkpoint_dir)  # raises Orbax's error if there is no such directory
        return {}
    lists = await asyncio.gather(*map(store._get_array_metadatas, dict.fromkeys([paths[0], *paths[also_read]])))
    _, entries = lists[0]
    arrays = {}
    for entry in entries:
        key_impl = (entry.ext_metadata or {}).get(array_metadata_lib.RANDOM_KEY_IMPL, "")
        arrays[entry.param_name] = SavedArray(tuple(entry.chunk_shape), key_impl)
    return arrays


def without_array_metadata(handler: type_handlers.ArrayHandler) -> type_handlers.ArrayHandler:
    """Returns a copy of the handler that reads arrays without the checkpoint's own list of them.

    Each call of `ArrayHandler.deserialize` reads the lists of all processes that saved, to learn which arrays are typed
    PRNG keys.
    """
    reader = copy.copy(handler)
    reader._array_metadata_store = None
    return reader
