"""Blocks of a local checkpoint, without a checkpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
import types
from typing import Any

import pytest
from orbax.checkpoint import type_handlers

from orbax_ext.storage.checkpoint.digest_files import StoredDigests
from orbax_ext.transfer import local_blocks
from orbax_ext.transfer.local_blocks import LocalBlocks

pytestmark = pytest.mark.once

LEAVES = 40


@dataclasses.dataclass
class Asked:
    """A leaf that is asked for."""

    leaf: Any
    info: Any = None


def test_few_leaves_at_a_time_are_compared_with_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, under_way, most = threading.Lock(), 0, 0

    def check_digest(*args: Any) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        with lock:
            under_way -= 1
        raise ValueError("another digest")

    monkeypatch.setattr(local_blocks, "_check_digest", check_digest)
    names = [f"leaf {number}" for number in range(LEAVES)]
    request: Any = types.SimpleNamespace(leaf_requests=[Asked(types.SimpleNamespace(name=name)) for name in names])
    tables: Any = dict.fromkeys(range(LEAVES), types.SimpleNamespace(of_process=lambda process: [0]))
    blocks = LocalBlocks(type_handlers.ArrayHandler(), request, tables, [None] * LEAVES, 20.0)
    blocks._local, blocks._digests = [None] * LEAVES, StoredDigests(2, {name: {} for name in names})
    blocks.present = dict.fromkeys(range(LEAVES), (0,))
    asyncio.run(blocks.load(range(LEAVES), {}))
    assert 1 < most <= 4
    assert len(blocks._damaged) == LEAVES
