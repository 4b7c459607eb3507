"""Bytes that are under way at a time."""

from __future__ import annotations

import asyncio

import pytest

from orbax_ext.transfer.room import Room

pytestmark = pytest.mark.once


@pytest.mark.parametrize("counts", [[2, 2, 2, 2], [9, 1, 1], [3, 3, 1]], ids=str)
def test_no_more_is_under_way_than_there_is_room_for(counts: list[int]) -> None:
    async def case() -> None:
        room, under_way, seen = Room(4), 0, []

        async def take(count: int) -> None:
            nonlocal under_way
            async with room.taken(count):
                under_way += min(count, 4)
                await asyncio.sleep(0)
                seen.append(under_way)
                under_way -= min(count, 4)

        await asyncio.gather(*map(take, counts))
        assert max(seen) == 4

    asyncio.run(case())
