"""What was read for exchanges is used without them where that is possible."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.boxes import ReadItem
from orbax_ext.transfer.kept_reads import KeptReads

pytestmark = pytest.mark.once

SHARDING = NamedSharding(Mesh(np.array(jax.local_devices()[:1]), ("x",)), PartitionSpec())
(DEVICE,) = SHARDING.addressable_devices
LEAF = Leaf("w", (8,), "float32", 4, (8,), mesh=0)
WHOLE = ReadItem(0, LeafRequest(None, None, LEAF, SHARDING), LEAF, SHARDING, Block((8,), np.dtype(np.float32)))
BLOCKS = {DEVICE: np.arange(8, dtype=np.float32)}


def test_what_is_whole_is_kept_until_it_is_taken() -> None:
    kept = KeptReads()
    kept.add([WHOLE], {0: BLOCKS})
    assert kept.bytes == 32
    assert kept.take([0, 1]) == {0: BLOCKS}
    assert kept.bytes == 0
    assert kept.take([0]) == {}


def test_pieces_and_what_orbax_has_read_are_not_kept() -> None:
    kept = KeptReads()
    piece = dataclasses.replace(WHOLE, block=Block((2,), np.dtype(np.float32)))
    kept.add([piece], {0: {DEVICE: np.zeros(2, np.float32)}})
    kept.add([WHOLE], {0: {DEVICE: jax.device_put(BLOCKS[DEVICE], DEVICE)}})
    kept.add([WHOLE], {0: {}})
    assert kept.bytes == 0


def test_nothing_is_kept_when_the_first_exchange_has_begun() -> None:
    kept = KeptReads()
    kept.add([WHOLE], {0: BLOCKS})
    kept.end()
    kept.add([WHOLE], {0: BLOCKS})
    assert kept.take([0]) == {}
