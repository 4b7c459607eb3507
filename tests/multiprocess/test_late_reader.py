"""A reader that is late (google/orbax #3181): stock Orbax's other processes run into a time-out, ours wait."""

from __future__ import annotations

import asyncio

import jax
import pytest

from orbax_ext import lab
from tests.multiprocess import world
from tests.multiprocess.world import MeshSpec

pytestmark = pytest.mark.core

# Each pair of processes that exchanges data has no communicator yet when the restore begins.
MESH = MeshSpec((1, 2, 8), ("pp", "dp", "tp"))
LATE = 45.0  # opening a communicator gives up after 30 s


def test_a_reader_45_s_late_breaks_stock_orbax_and_not_ours(path: str) -> None:
    with lab.Cluster(4, 4, timeout=180) as stock, lab.Cluster(4, 4, timeout=180) as ours:
        ours.run(world.save, path, world.STATE, MESH)
        theirs = stock.submit(restore_late, path, "stock")
        mine = ours.submit(restore_late, path, "ours")
        outcomes = mine.outcomes()
        assert [outcome.value for outcome in outcomes] == [[]] * 4, "\n".join(map(str, outcomes))
        assert not all(outcome.ok for outcome in theirs.outcomes(60))


# Run on the processes.


def restore_late(path: str, how: str) -> list[str]:
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
