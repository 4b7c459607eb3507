"""Every dtype travels bit for bit; what the stock broadcast makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_ext import lab
from orbax_ext import mesh as mesh_lib
from orbax_ext.exchange import Block, Exchange
from tests.multiprocess import world
from tests.multiprocess.world import P, Spec

pytestmark = pytest.mark.core

FLOAT8 = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
PLAIN = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
TINY = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
STORABLE = [*PLAIN, *WIDE, "int4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"]


def test_every_dtype_that_orbax_stores_comes_back_bit_for_bit(cluster: lab.Cluster, path: str) -> None:
    assert world.all_of(cluster.run(save_and_restore, path, _all(STORABLE), "ours")) == []


def test_the_exchange_carries_every_dtype_that_jax_has(cluster: lab.Cluster) -> None:
    assert world.all_of(cluster.run(exchange_all, [*PLAIN, *WIDE, *TINY, *FLOAT8])) == []


def test_stock_orbax_changes_dtypes_and_signs_of_zero(cluster: lab.Cluster, path: str) -> None:
    dtypes = ["bool", "int8", "int16", "uint8", "float32", "int32"]
    changed = cluster.run(save_and_restore, path, _all(dtypes), "stock")[0]
    assert "bool_matrix: dtype int32, not bool" in changed
    assert "int8_matrix: dtype int32, not int8" in changed
    assert "int16_matrix: dtype int32, not int16" in changed
    assert "uint8_matrix: dtype uint32, not uint8" in changed
    assert "float32_matrix: bytes" in changed
    assert not any(text.startswith("int32") for text in changed)


def test_stock_orbax_cannot_broadcast_int4(cluster: lab.Cluster, path: str) -> None:
    outcomes = cluster.outcomes(save_and_restore, path, _all(["int4"]), "stock")
    assert not any(outcome.ok for outcome in outcomes)


def _all(dtypes: list[str]) -> dict[str, Spec]:
    """A sharded matrix, a replicated vector and a scalar of each."""
    return {
        f"{dtype}_{name}": Spec(shape, dtype, spec)
        for dtype in dtypes
        for name, shape, spec in [("matrix", (16, 6), P("tp")), ("vector", (7,), P()), ("scalar", (), P())]
    }


# Run on the processes.


@contextlib.contextmanager
def wide_types() -> Iterator[None]:
    """Lets this process have 64-bit types for a while."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def save_and_restore(path: str, specs: dict[str, Spec], how: str) -> list[str]:
    wide = any(spec.dtype in WIDE for spec in specs.values())
    with wide_types() if wide else contextlib.nullcontext():
        world.save(path, specs)
        return world.restore(path, specs, how=how, knobs=world.knobs_for(how, world.REPORTERS, "dp"))


def exchange_all(dtypes: list[str]) -> list[str]:
    """Sends a matrix and a scalar of each dtype from replica 1 to all others; returns what arrives changed."""
    wrong = []
    with wide_types():
        devices = mesh_lib.by_replica(world.REPORTERS.make(), ["dp"])
        exchange = Exchange(devices)
        for dtype in dtypes:
            for shape in [(5, 6), ()]:
                block = Block(shape, jnp.dtype(dtype))
                data = world.random_array(7, Spec(block.carried_shape, dtype))
                exchange.compile((block,))
                zeros = np.zeros_like(data)
                sent = {
                    device: jax.device_put((data if replica == 1 else zeros).view(block.carried_dtype), device)
                    for replica, row in enumerate(devices)
                    for device in row
                    if device.process_index == jax.process_index()
                }
                (received,) = exchange.run((block,), [sent])
                if any(world.bits(array) != data.tobytes() or array.dtype != dtype for array in received.values()):
                    wrong.append(f"{dtype} {shape}")
    return wrong
