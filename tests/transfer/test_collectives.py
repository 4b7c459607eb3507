"""Exchanges among the devices of one process."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_ext.transfer import collectives
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.collectives import Exchange, SumOp

# In a process of its own, because the number of devices can't be changed once JAX has started.
RELAYS = """
import jax, jax.numpy as jnp, numpy as np
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.collectives import RelayOp, exchange_among

devices = np.array(jax.devices()).reshape(4, 2)
exchange = exchange_among(tuple(map(tuple, devices)))
exchange.connect_moves(sums=True)

def check(name, moves, senders, sources):
    dtype = jnp.dtype(name)
    most = 2 if name == "bool" else 256
    bits = np.random.default_rng(0).integers(0, most, (8, dtype.itemsize * 3)).astype(np.uint8)
    if name == "float32":  # a signalling NaN, the smallest number, -0.0
        bits[2] = bits[6] = np.array([0x7FA00001, 1, 0x80000000], np.uint32).view(np.uint8)
    operand = {d: jax.device_put(row.view(dtype), d) for d, row in zip(devices.ravel(), bits, strict=True)}
    op = RelayOp(Block((3,), dtype), moves, senders, 8)
    program = exchange.compile((op,)).as_text()
    if name == "float32" and not senders:  # each conversion copies the block of every device
        assert "bitcast-convert(" not in program
    (out,) = exchange.run((op,), [operand])
    for place, source in enumerate(sources):
        expected = bytes(dtype.itemsize * 3) if source is None else bits[source].tobytes()
        assert np.asarray(out[devices.ravel()[place]]).tobytes() == expected, (name, place, source)
    kept = not any(block.is_deleted() for block in operand.values())
    assert kept == (not senders), (name, senders)  # without a sum, devices go on with what they have handed in

for name in ("float32", "int32", "bfloat16", "int8", "bool", "complex64"):
    check(name, ((2, 0), (5, 1)), (), [2, 5, *[None] * 6])  # only receivers get a block
    check(name, (), (6, 3), [6, 3, 6, 3, 6, 3, 6, 3])
    check(name, ((0, 1),), (2, 1), [2, 0, 2, 0, 2, 0, 2, 0])  # a device that has received sends it on
print("exact")
"""


def test_relays_move_blocks_bit_for_bit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RELAYS],
        capture_output=True,
        text=True,
        timeout=240,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
        check=False,
    )
    assert done.stdout == "exact\n", done.stderr


@pytest.mark.once
def test_an_exchange_that_is_not_compiled_yet_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is late comes to an exchange as it is; the others would wait inside for it."""
    monkeypatch.setattr(collectives, "_MOST_PROGRAMS", 1)
    device = jax.devices()[0]
    exchange = Exchange(np.array([[device]]))

    def run(size: int) -> list[float]:
        op = SumOp(Block((size,), jnp.dtype("float32")))
        (out,) = exchange.run((op,), [{device: jax.device_put(np.arange(size, dtype=np.float32), device)}])
        return np.asarray(out[device]).tolist()

    assert run(2) == [0, 1]
    assert run(3) == [0, 1, 2]
    assert run(2) == [0, 1]  # whose program was dropped meanwhile
