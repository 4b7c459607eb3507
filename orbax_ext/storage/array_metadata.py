"""What the checkpoint knows of stored arrays: shape, dtype and the sharding they were saved with."""

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
class Stored:
    """The part of Orbax's ArrayMetadata that a restore needs."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any  # Orbax's ShardingMetadata, or None


async def look_up(handler: type_handlers.ArrayHandler, infos: Sequence[Any]) -> Sequence[Any]:
    """Orbax's metadata of the arrays; from S3 one process reads it and tells the others.

    Otherwise every process would open every array: three or more requests for each of them.
    """
    snapshot = s3.snapshot_of(infos[0].parent_dir)
    if snapshot is None:
        return await handler.metadata(infos)

    def ask() -> list[dict[str, Any]]:
        return [_as_plain(found) for found in asyncio.run(handler.metadata(infos))]

    what = f"arrays {digest([info.name for info in infos])}"
    found = await in_thread(snapshot.ask, what, str(infos[0].parent_dir), ask)
    return [
        Stored(
            tuple(plain["shape"]),
            None if plain["dtype"] is None else jnp.dtype(plain["dtype"]),
            sharding_from_text(plain["sharding"]),
        )
        for plain in found
    ]


def _as_plain(found: Any) -> dict[str, Any]:
    return {
        "shape": [int(size) for size in found.shape],
        "dtype": None if found.dtype is None else jnp.dtype(found.dtype).name,
        "sharding": None if found.sharding is None else found.sharding.to_serialized_string(),
    }
