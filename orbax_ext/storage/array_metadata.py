"""Shape, dtype and, where it is needed, saved sharding of stored arrays, as Orbax reads them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from orbax.checkpoint import type_handlers

from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan.planner import digest
from orbax_ext.storage import s3
from orbax_ext.storage.s3.errors import reads_explained
from orbax_ext.upstream.array_handler import sharding_from_text
from orbax_ext.upstream.stored_arrays import StoredSpec, missing_files_named, open_arrays


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """The part of Orbax's ArrayMetadata that a restore needs."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None  # Orbax's ShardingMetadata, or None
    chunk: tuple[int, ...] | None = None  # of an array that is in no checkpoint, whose list would have it


async def read(handler: type_handlers.ArrayHandler, infos: Sequence[Any], *, shardings: bool = True) -> Sequence[Any]:
    """Returns metadata of the arrays. From S3, at three or more requests each, one process reads it for all.

    Without `shardings` it does not read the file that holds these, and works if that file is damaged.
    """
    snapshot = s3.snapshot_of(infos[0].parent_dir)
    if snapshot is None:
        return await _read(handler, infos, shardings)

    def read_all() -> list[dict[str, Any]]:
        return [to_json(metadata) for metadata in asyncio.run(_read(handler, infos, shardings))]

    name = f"arrays {digest([shardings, *(info.name for info in infos)])}"
    return [from_json(data) for data in await in_thread(snapshot.ask, name, str(infos[0].parent_dir), read_all)]


async def _read(handler: type_handlers.ArrayHandler, infos: Sequence[Any], shardings: bool) -> Sequence[Any]:
    async with missing_files_named(handler, infos):
        if shardings:
            return await handler.metadata(infos)
        with reads_explained(infos[0].parent_dir):
            stores = await open_arrays(handler, infos)
        return [_metadata(info, store) for info, store in zip(infos, stores, strict=True)]


def _metadata(info: Any, store: Any) -> ArrayMetadata:
    if any(store.domain.origin):
        raise ValueError(f"{info.name}: expected a stored array that begins at 0, found the domain {store.domain}.")
    chunk = info.chunk(store) if isinstance(info, StoredSpec) else None
    return ArrayMetadata(tuple(store.shape), jnp.dtype(store.dtype.name), chunk=chunk)


def to_json(metadata: Any) -> dict[str, Any]:
    return {
        "shape": [int(size) for size in metadata.shape],
        "dtype": None if metadata.dtype is None else jnp.dtype(metadata.dtype).name,
        "sharding": None if metadata.sharding is None else metadata.sharding.to_serialized_string(),
    }


def from_json(data: dict[str, Any]) -> ArrayMetadata:
    dtype = None if data["dtype"] is None else jnp.dtype(data["dtype"])
    return ArrayMetadata(tuple(data["shape"]), dtype, sharding_from_text(data["sharding"]))
