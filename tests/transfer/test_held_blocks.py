from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import numpy as np
import pytest

from orbax_ext.transfer.held_blocks import HeldBlocks, Unit

pytestmark = pytest.mark.once

BLOCKS: Any = {0: {"device": np.zeros(3)}}


def held_blocks(shares: int = 1, whole: int = 4) -> tuple[HeldBlocks, list[Unit], list[Unit]]:
    """Returns a place for three groups, with the units of their shares and those of whole groups."""
    share: Any = mock.Mock()
    share.plan.groups = ("first", "second", "third")
    units, wholes = [Unit((), shares) for _ in range(3)], [Unit((), whole) for _ in range(3)]
    return HeldBlocks(share, units, wholes=wholes), units, wholes


def test_whole_groups_are_read_after_all_shares_from_the_last_one_on() -> None:
    held, units, wholes = held_blocks()
    assert held.begin_whole(100) is None
    assert [held.begin(100) for _ in range(4)] == [*units, None]
    assert held.begin_whole(3) is None
    assert [held.begin_whole(4) for _ in range(4)] == [*reversed(wholes), None]


def test_nothing_more_is_read_once_a_restore_takes() -> None:
    held, units, _ = held_blocks()
    for _ in units:
        held.begin(100)
    held.freeze()
    assert held.begin_whole(100) is None


def test_what_is_not_read_yet_or_could_not_be_read_is_not_held_as_a_whole() -> None:
    held, units, wholes = held_blocks()
    for unit in [held.begin(100) for _ in units]:
        assert unit is not None
        unit.blocks.set_result(BLOCKS)
    for _ in wholes:
        held.begin_whole(100)
    wholes[1].blocks.set_result(BLOCKS)
    assert held.whole_groups == 0
    wholes[2].blocks.set_result(BLOCKS)
    assert held.whole_groups == 2
    wholes[0].blocks.set_exception(OSError("gone"))
    assert held.whole_groups == 2
    assert asyncio.run(held.take_whole(0)) == {}
    assert asyncio.run(held.take_whole(2)) == BLOCKS
    assert asyncio.run(held.take_whole(2)) == {}
    assert held.whole_groups == 2  # also after it was taken
    assert asyncio.run(held.take_group(2)) == {}  # it does not travel
    assert asyncio.run(held.take_group(1)) == BLOCKS
