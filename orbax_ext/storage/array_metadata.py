"""Shape, dtype and saved sharding of stored arrays, as Orbax reads them."""

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
from orbax_ext.upstream.array_handler import sharding_from_text


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """The part of Orbax's ArrayMetadata that a restore needs."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any  # Orbax's ShardingMetadata, or None


async def read(handler: type_handlers.ArrayHandler, infos: Sequence[Any]) -> Sequence[Any]:
    """Returns Orbax's metadata of the arrays. From S3, at three or more requests each, one process reads it for all."""
    snapshot = s3.snapshot_of(infos[0].parent_dir)
    if snapshot is None:
        return await handler.metadata(infos)

    def read_all() -> list[dict[str, Any]]:
        return [to_json(metadata) for metadata in asyncio.run(handler.metadata(infos))]

    name = f"arrays {digest([info.name for info in infos])}"
    return [from_json(data) for data in await in_thread(snapshot.ask, name, str(infos[0].parent_dir), read_all)]


def to_json(metadata: Any) -> dict[str, Any]:
    return {
        "shape": [int(size) for size in metadata.shape],
        "dtype": None if metadata.dtype is None else jnp.dtype(metadata.dtype).name,
        "sharding": None if metadata.sharding is None else metadata.sharding.to_serialized_string(),
    }


def from_json(data: dict[str, Any]) -> ArrayMetadata:
    dtype = None if data["dtype"] is None else jnp.dtype(data["dtype"])
    return ArrayMetadata(tuple(data["shape"]), dtype, sharding_from_text(data["sharding"]))
