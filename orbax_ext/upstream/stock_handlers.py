"""Orbax's own single-replica handler, whoever makes it: its restores go to orbax_ext while these hooks are installed.

Trainers make that handler themselves, some right before they restore (MaxText, MaxDiffusion), some in a registry of
their own (Orbax's p2p manager). Orbax looks both functions up at each call, so handlers that exist already are served
too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import jax_array_handlers

from orbax_ext.options import STOCK_FIELDS
from orbax_ext.upstream.hooks import Hook, serving

Choose = Callable[[type_handlers.ArrayHandler], type_handlers.ArrayHandler | None]


def single_replica_settings(handler: type_handlers.SingleReplicaArrayHandler) -> dict[str, Any]:
    """Returns the arguments that such a handler has beside those of ArrayHandler."""
    return {name: getattr(handler, name) for name in STOCK_FIELDS}


def _deserialize(original: Callable[..., Any], choose: Choose) -> Callable[..., Any]:
    @functools.wraps(original)
    async def deserialize(self: Any, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[jax.Array]:
        ours = choose(self)
        if ours is None:
            return await original(self, infos, args)
        with serving(HANDLER.label):
            return await ours.deserialize(infos, args)

    return deserialize


def _broadcast(original: Callable[..., Any], choose: Choose) -> Callable[..., Any]:
    @functools.wraps(original)
    async def broadcast(
        infos: Sequence[Any],
        args: Sequence[Any],
        shardings: Sequence[Any],
        single_replica_shardings: Sequence[Any],
        replica_axis_index: int,
        primary_replica_id: int,
        metadata_key: str | None,
        broadcast_memory_limit_bytes: int | None,
        broadcast_memory_scaling_factor: float | None,
    ) -> Sequence[jax.Array]:
        settings = (
            replica_axis_index,
            primary_replica_id,
            broadcast_memory_limit_bytes,
            broadcast_memory_scaling_factor,
        )
        ours = choose(type_handlers.SingleReplicaArrayHandler(*settings, metadata_key=metadata_key))
        if ours is None:
            given = (infos, args, shardings, single_replica_shardings, *settings[:2], metadata_key, *settings[2:])
            return await original(*given)
        with serving(FUNCTION.label):
            asked = [
                dataclasses.replace(arg, sharding=sharding, mesh=None, mesh_axes=None)
                for arg, sharding in zip(args, shardings, strict=True)
            ]
            return await ours.deserialize(infos, asked)

    return broadcast


HANDLER = Hook(
    type_handlers.SingleReplicaArrayHandler,
    "deserialize",
    "the restore of every stock handler, also with restore args and meshes that it refuses",
    _deserialize,
)
FUNCTION = Hook(
    jax_array_handlers,
    "_single_replica_deserialize_and_broadcast",
    "the restore of subclasses with a `deserialize` of their own",
    _broadcast,
)
HOOKS = (HANDLER, FUNCTION)
