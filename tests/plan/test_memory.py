from __future__ import annotations

import pytest

from orbax_ext.options import Options
from orbax_ext.plan import memory

pytestmark = pytest.mark.once

MIB = 1 << 20
PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("state", "lane_batch", "free", "limit"),
    [
        (0, 0, PLENTY, 64 * MIB),
        (1024 * MIB, 0, PLENTY, 128 * MIB),
        (4096 * MIB, 0, PLENTY, 256 * MIB),
        (0, 40 * MIB, PLENTY, 240 * MIB),
        (4096 * MIB, 0, 40 * MIB, 30 * MIB),
        (4096 * MIB, 0, 0, 1),
    ],
    ids=["least", "an eighth of the state", "most", "six lane batches", "what is free", "nothing is free"],
)
def test_the_limit_follows_from_the_state_and_the_free_memory(
    state: int, lane_batch: int, free: int, limit: int
) -> None:
    assert memory.limit(Options(), state, lane_batch, free) == limit


def test_the_limit_of_the_user_counts() -> None:
    assert memory.limit(Options(broadcast_memory_limit_bytes=7), 1 << 30, 0, PLENTY) == 7


def test_the_scaling_factor_is_the_share_of_the_free_memory() -> None:
    options = Options(broadcast_memory_scaling_factor=0.5)
    assert memory.limit(options, 4096 * MIB, 0, 40 * MIB) == 20 * MIB


@pytest.mark.parametrize(("limit", "group"), [(64 * MIB, 16 * MIB), (3, 1), (1, 1)])
def test_four_groups_keep_to_the_limit(limit: int, group: int) -> None:
    assert memory.group_bytes(limit, "spread") == group


def test_two_more_groups_keep_to_the_limit_if_some_are_read_directly_meanwhile() -> None:
    assert memory.group_bytes(60 * MIB, "auto") == 10 * MIB


def test_five_groups_keep_to_the_limit_if_one_replica_reads() -> None:
    assert memory.group_bytes(60 * MIB, "single") == 12 * MIB
