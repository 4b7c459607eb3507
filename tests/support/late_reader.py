"""A restore whose reader is late. Run on the processes."""

from __future__ import annotations

import asyncio

import jax

from tests.support import world
from tests.support.world import MeshSpec

# Each pair of processes that exchanges data has no communicator yet when the restore begins.
MESH = MeshSpec((1, 2, 8), ("pp", "dp", "tp"))
LATE = 45.0  # opening a communicator gives up after 30 s


def restore(path: str, how: str) -> list[str]:
    from orbax.checkpoint._src.serialization import serialization

    original = serialization.async_deserialize

    async def late(*args: object, **kwargs: object) -> object:
        if jax.process_index() == 0:
            await asyncio.sleep(LATE)
        return await original(*args, **kwargs)

    serialization.async_deserialize = late
    try:
        return world.restore(path, world.STATE, MESH, how=how, knobs=world.knobs_for(how, MESH, "dp"))
    finally:
        serialization.async_deserialize = original
