"""Stored arrays: opening and reading them with TensorStore, by the specs that Orbax builds or by the user's own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import tensorstore
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import (
    limits,
    serialization,
    tensorstore_utils,
)

from orbax_ext.plan import requests as requests_plan
from orbax_ext.upstream import array_index

_REOPENING = 0.5  # seconds that an array may take to be opened without a look at storage: it takes less than 1 ms
_FEW = 64 << 10  # bytes that cost more to ask for than to transfer
# How a database merges requests for chunks in one file: those that come while another one is under way, and lie close
# together. A process reads small arrays that were saved one after the other. Orbax itself merges requests to object
# stores, of chunks of any size.
_MERGED = {
    "experimental_read_coalescing_threshold_bytes": 4096,
    "experimental_read_coalescing_merged_bytes": 1 << 20,
}


@dataclasses.dataclass(eq=False)
class StoredSpec:
    """An array that has a TensorStore spec and is in no checkpoint. Takes the place of Orbax's `ParamInfo`."""

    name: str
    spec: Mapping[str, Any]  # as JSON
    ts_context: Any
    parent_dir: str  # the URL of the array, for messages
    byte_limiter: Any = None
    is_ocdbt_checkpoint: bool = True  # so that nobody looks for files

    def chunk(self, store: tensorstore.TensorStore) -> tuple[int, ...] | None:
        """Returns the least that can be read, if parts of the array can be: not of a view of another one."""
        if self.spec["driver"] not in ("zarr", "zarr3") or "transform" in self.spec:
            return None
        return tuple(size or 1 for size in store.chunk_layout.read_chunk.shape or ()) or None


def checkpoint_of(info: Any) -> Any:
    """Returns the directory of the checkpoint that an array is in, None if it is in none."""
    return None if isinstance(info, StoredSpec) else info.parent_dir


def places_of(infos: Sequence[Any]) -> set[str]:
    """Returns the directories or URLs that arrays are in: those of a checkpoint are in one."""
    return {os.fspath(info.parent_dir) for info in (infos if isinstance(infos[0], StoredSpec) else infos[:1])}


def store_of(info: Any) -> str:
    """Returns a name of the store that an array is in: a bucket, or the first two directories of a path."""
    return "/".join(os.fspath(info.parent_dir).split("/")[:3])


async def deserialize(handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]) -> Any:
    """Reads what this process's devices hold of arrays, as plain Orbax does."""
    if not isinstance(infos[0], StoredSpec):
        return await type_handlers.ArrayHandler.deserialize(handler, infos, args)
    results = await asyncio.gather(
        *(
            serialization.async_deserialize(
                arg.sharding, _read_spec(handler, info), arg.global_shape, arg.dtype, context=info.ts_context
            )
            for info, arg in zip(infos, args, strict=True)
        )
    )
    return [array for array, _ in results]


async def open_arrays(handler: type_handlers.ArrayHandler, infos: Sequence[Any]) -> list[tensorstore.TensorStore]:
    """Opens stored arrays, to learn their shapes and dtypes. Does not read the file of shardings."""
    return await asyncio.gather(
        *(
            tensorstore.open(tensorstore.Spec(_read_spec(handler, info)), open=True, context=info.ts_context)
            for info in infos
        )
    )


async def begin_opening(
    handler: type_handlers.ArrayHandler,
    infos: Sequence[Any],
    sizes: Sequence[int],
    numbers: Sequence[int],
    requests: int,
) -> list[Any]:
    """Begins to open stored arrays, to read so many bytes of each as they are stored; returns TensorStore's futures.

    `numbers` are the places of the arrays in the checkpoint. So many requests are under way at a time, unless the user
    has said how many.
    """
    specs, contexts = [], [_with_requests(info.ts_context, requests) for info in infos]
    small: dict[Any, list[int]] = {}  # by database and context
    for at, (spec, database) in enumerate(_read_specs(handler, infos, sizes)):
        specs.append(spec)
        if database is not None:
            small.setdefault((database, contexts[at]), []).append(at)
    for (_, context), places in small.items():
        names = [infos[at].name for at in places]
        store = {name: value for name, value in specs[places[0]]["kvstore"].items() if name != "path"}
        found = await array_index.indexed(store, names, [numbers[at] for at in places], context)
        if found is not None:
            for at, name in zip(places, names, strict=True):
                specs[at] = {**specs[at], "kvstore": {**found, "path": name}}
    return [tensorstore.open(spec, open=True, context=context) for spec, context in zip(specs, contexts, strict=True)]


def reopening() -> Callable[[tensorstore.TensorStore], tensorstore.TensorStore]:
    """Returns a function that opens arrays once more, without a look at storage, to read what does not come again.

    They have a cache and connections of their own: a read of a chunk that is being read waits for that read, as long as
    both have the same cache.
    """
    contexts: dict[str, tensorstore.Context] = {}  # so that arrays of one database share what they read of it

    def reopened(store: tensorstore.TensorStore) -> tensorstore.TensorStore:
        spec = store.spec(unbind_context=True).to_json()
        if "kvstore" in spec:  # the index is in the memory of the first context
            spec["kvstore"] = array_index.without_index(spec["kvstore"])
        resources = json.dumps(spec.pop("context", {}), sort_keys=True)
        if resources not in contexts:
            contexts[resources] = tensorstore.Context(json.loads(resources))
        opened = tensorstore.open(spec, open=True, assume_metadata=True, context=contexts[resources])
        try:
            return opened.result(timeout=_REOPENING)
        except (ValueError, TimeoutError):  # some views can't be opened without a look at storage
            return store

    return reopened


def with_request_concurrency(infos: Sequence[Any], limit: int | None) -> list[Any]:
    """Returns Orbax's descriptions of arrays in object stores with so many requests under way at a time.

    By default that is more than the 32 of TensorStore, and `begin_opening` may change it, unless the user has set a
    number in TensorStore's own way.
    """
    if not any(place.startswith(("s3://", "gs://")) for place in places_of(infos)):
        return [*infos]
    contexts = {id(info.ts_context): info.ts_context for info in infos}
    raised = {key: _with_request_concurrency(context, limit) for key, context in contexts.items()}
    copies = [copy.copy(info) for info in infos]
    for info in copies:
        info.ts_context = raised[id(info.ts_context)]
    return copies


def _with_request_concurrency(context: tensorstore.Context | None, limit: int | None) -> tensorstore.Context | None:
    if context is None:
        return None
    given = context.spec.to_json() or {}
    resources = [
        f"{store}_request_concurrency"
        for store in ("s3", "gcs")
        if limit is not None
        or not (
            f"{store}_request_concurrency" in given or f"TENSORSTORE_{store.upper()}_REQUEST_CONCURRENCY" in os.environ
        )
    ]
    raised = _limited(context, resources, limit or requests_plan.FIRST)
    if limit is None and resources:
        _following[raised] = _Following(resources, {})
    return raised


@dataclasses.dataclass(frozen=True)
class _Following:
    """A context whose numbers of requests may change."""

    resources: Sequence[str]
    contexts: dict[int, tensorstore.Context]  # by other numbers: arrays in one context share what is read of a database


_following: weakref.WeakKeyDictionary[tensorstore.Context, _Following] = weakref.WeakKeyDictionary()


def _with_requests(context: tensorstore.Context | None, count: int) -> tensorstore.Context | None:
    """Returns the context, or one like it with so many requests under way at a time."""
    following = None if context is None else _following.get(context)
    if context is None or following is None or count == requests_plan.FIRST:
        return context
    if count not in following.contexts:
        following.contexts[count] = _limited(context, following.resources, count)
    return following.contexts[count]


def _limited(context: tensorstore.Context, resources: Sequence[str], count: int) -> tensorstore.Context:
    limits = {resource: {"limit": count} for resource in resources}
    return tensorstore.Context(limits, parent=context) if limits else context


def read_footprint(store: tensorstore.TensorStore, domain: Any) -> int:
    """Returns the memory that reading a domain takes: chunks are read whole."""
    return int(serialization.estimate_read_memory_footprint(store, domain))


def fits_under_way(limiter: Any, count: int) -> bool:
    """Returns whether so many bytes may be read at once, by Orbax's `restore_concurrent_gb`."""
    return limiter is None or count < getattr(limiter, "max_bytes", count + 1)


def bytes_under_way(limiter: Any, count: int) -> contextlib.AbstractAsyncContextManager[None]:
    """Counts so many bytes as under way; waits until Orbax's limiter lets them."""
    made: contextlib.AbstractAsyncContextManager[None] = limits.reserved_bytes(
        limits.get_byte_limiter() if limiter is None else limiter, count
    )
    return made


@contextlib.asynccontextmanager
async def missing_files_named(handler: type_handlers.ArrayHandler, infos: Sequence[Any]) -> AsyncIterator[None]:
    """Raises Orbax's `FileNotFoundError` if reading these arrays fails and files of them are missing.

    `ArrayHandler.deserialize` looks for the files before it reads. TensorStore's own error is a `ValueError`.
    """
    try:
        yield
    except Exception:
        await asyncio.gather(
            *(
                tensorstore_utils.assert_parameter_files_exist(
                    info.parent_dir / info.name, handler._metadata_key, info.use_zarr3
                )
                for info in infos
                if not info.is_ocdbt_checkpoint
            )
        )
        raise


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
    """Reads a view of one array as `ArrayHandler.deserialize` reads the array.

    `transform` is TensorStore's JSON index transform, `shape` the view's shape. Raises if the array is not stored in
    `stored_shape`; Orbax checks the shape only of an array that is read whole.
    """
    spec = copy.deepcopy(_read_spec(handler, info, arg.dtype))
    innermost = spec
    while "base" in innermost:
        innermost = innermost["base"]
    innermost.setdefault("metadata", {})["shape"] = list(stored_shape)
    async with missing_files_named(handler, [info]):
        array, _ = await serialization.async_deserialize(
            sharding,
            {**spec, "transform": transform},
            global_shape=tuple(shape),
            dtype=arg.dtype,
            byte_limiter=info.byte_limiter,
            context=info.ts_context,
        )
    return array


def _read_specs(
    handler: type_handlers.ArrayHandler, infos: Sequence[Any], sizes: Sequence[int]
) -> Iterator[tuple[Any, Any]]:
    """Yields TensorStore's spec of each stored array, and what stands for its database if that has it as a small one.

    Arrays in one database differ only in a name. Requests for small ones are merged, also where Orbax does not do that.
    """
    first: dict[tuple[Any, ...], Any] = {}
    for info, size in zip(infos, sizes, strict=True):
        if isinstance(info, StoredSpec):
            yield _read_spec(handler, info), None
            continue
        # The property checks its type each time, which takes longer than all the rest.
        directory = vars(info).get("_parent_dir") or info.parent_dir
        small = size < _FEW
        place = (small, directory, info.is_ocdbt_checkpoint, info.use_zarr3, info.raise_array_data_missing_error)
        if place not in first:
            spec = _read_spec(handler, info)
            named = info.is_ocdbt_checkpoint and spec["kvstore"].get("path") == info.name
            if named and small:
                spec = {**spec, "kvstore": {**_MERGED, **spec["kvstore"]}}
            first[place] = spec if named else None
            yield spec, place if named and small else None
        elif (spec := first[place]) is None:
            yield _read_spec(handler, info), None
        else:
            yield {**spec, "kvstore": {**spec["kvstore"], "path": info.name}}, place if small else None


def _read_spec(handler: type_handlers.ArrayHandler, info: Any, dtype: Any = None) -> Any:
    """Returns TensorStore's spec of a stored array, as JSON."""
    if isinstance(info, StoredSpec):
        return copy.deepcopy(dict(info.spec))
    return tensorstore_utils.build_array_read_spec(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        metadata_key=handler._metadata_key,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
        target_dtype=dtype,
    ).json
