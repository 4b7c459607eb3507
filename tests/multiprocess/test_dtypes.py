"""Arrays of every dtype are exchanged bit for bit; the stock broadcast changes some and fails for int4."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orbax_ext import lab
from orbax_ext import mesh as mesh_lib
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.collectives import Exchange, GatherOp, Op, SumOp
from tests.support import states
from tests.support.states import P, Spec

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
KINDS = ["bool", "int4", "bfloat16", "float32", "complex64"]
STORABLE = [*PLAIN, *WIDE, "int4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"]


@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(strategy, marks=pytest.mark.once) for strategy in ("single", "direct")),
        pytest.param("spread", marks=pytest.mark.core),
    ],
)
def test_every_dtype_that_orbax_stores_comes_back_bit_for_bit(cluster: lab.Cluster, path: str, strategy: str) -> None:
    assert states.all_differences(cluster.run(save_and_restore, path, _all(STORABLE), "ours", strategy=strategy)) == []


@pytest.mark.parametrize("strategy", states.STRATEGIES)
def test_wide_types_come_back_where_only_the_calling_thread_enables_them(
    cluster: lab.Cluster, path: str, strategy: str
) -> None:
    assert states.all_differences(cluster.run(restore_with_wide_types_in_one_thread, path, _all(WIDE), strategy)) == []


def test_the_exchange_carries_every_dtype_that_jax_has(cluster: lab.Cluster) -> None:
    assert states.all_differences(cluster.run(exchange_all, [*PLAIN, *WIDE, *TINY, *FLOAT8])) == []


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
    assert all("ValueError: Invalid integer data type 'V'." in str(outcome) for outcome in outcomes), outcomes


def _all(dtypes: list[str]) -> dict[str, Spec]:
    """Returns a sharded matrix, a replicated vector, a scalar and a layer too large to be packed, of each dtype."""
    small = [("matrix", (16, 6), P("tp")), ("vector", (7,), P()), ("scalar", (), P())]
    specs = {f"{dtype}_{name}": Spec(shape, dtype, spec) for dtype in dtypes for name, shape, spec in small}
    # Plain Orbax, too, changes NaNs in a layer of float8_e5m2 (JAX 0.12.0.1).
    for dtype in (dtype for dtype in dtypes if dtype != "float8_e5m2"):
        specs[f"{dtype}_layer"] = Spec((8, (128 << 10) // jnp.dtype(dtype).itemsize), dtype, P("tp"))
    return specs


# Run on the processes.


@contextlib.contextmanager
def wide_types() -> Iterator[None]:
    """Enables 64-bit types in this process as long as a `with` block lasts."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def save_and_restore(path: str, specs: dict[str, Spec], implementation: str, **knobs: str) -> list[str]:
    wide = any(spec.dtype in WIDE for spec in specs.values())
    with wide_types() if wide else contextlib.nullcontext():
        states.save(path, specs)
        axis = states.knobs_for(implementation, states.REPORTED_MESH, "dp")
        return states.restore(path, specs, implementation=implementation, knobs={**axis, **knobs})


def restore_with_wide_types_in_one_thread(path: str, specs: dict[str, Spec], strategy: str) -> list[str]:
    with wide_types():
        states.save(path, specs)
    with jax.enable_x64(True):
        return states.restore(path, specs, knobs={"replica_axis": "dp", "strategy": strategy})


def exchange_all(dtypes: list[str]) -> list[str]:
    """Exchanges arrays of each dtype with every kind of operation; returns the names of those that changed."""
    with wide_types():
        table = mesh_lib.by_replica(states.REPORTED_MESH.make(), ["dp"])
        replica_of = {d: row for row, devices in enumerate(table) for d in devices if d in jax.local_devices()}
        # Gathers move words of memory, whatever the dtype: one dtype of each kind is enough.
        cases = [case for dtype in dtypes for case in _cases(dtype)[: None if dtype in KINDS else 2]]
        ops = tuple(op for _, op, _, _ in cases)
        exchange = Exchange(table)
        exchange.compile(ops)  # one program compiles much faster than many
        sent = [
            {
                device: jax.device_put(np.ascontiguousarray(given[row]).view(op.operand.carried_dtype), device)
                for device, row in replica_of.items()
            }
            for _, op, given, _ in cases
        ]
        outputs = [(name, array) for name, _, _, expected in cases for array in expected]
        return [
            name
            for received, (name, wanted) in zip(exchange.run(ops, sent), outputs, strict=True)
            if any(states.bits(a) != wanted.tobytes() or a.dtype != wanted.dtype for a in received.values())
        ]


def _cases(dtype: str) -> list[tuple[str, Op, list[np.ndarray], list[np.ndarray]]]:
    """Returns (name, operation, input of each replica, outputs expected on all replicas)."""
    whole = [states.random_array(seed, Spec((8, 6), dtype)) for seed in range(4)]
    one = states.random_array(9, Spec((1,), dtype))
    block = Block((8, 6), jnp.dtype(dtype))
    zeros = np.zeros_like(whole[0])
    return [
        (f"{dtype} sum", SumOp(block), [zeros, whole[0], zeros, zeros], [whole[0]]),
        (f"{dtype} scalar", SumOp(Block((), block.dtype)), [zeros[0, :1], one, zeros[0, :1], zeros[0, :1]], [one]),
        (f"{dtype} rows", GatherOp(block, (2, 6), (4,), (0,)), np.split(whole[1], 4), [whole[1]]),
        (f"{dtype} lanes", GatherOp(block, (8, 6), (4,), (None,)), whole, whole),
        (f"{dtype} both", GatherOp(block, (4, 6), (2, 2), (None, 0)), _halves(whole[:2]), whole[:2]),
        (f"{dtype} columns", GatherOp(block, (4, 3), (2, 2), (0, 1)), _quarters(whole[2]), [whole[2]]),
    ]


def _halves(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [half for array in arrays for half in np.split(array, 2)]


def _quarters(array: np.ndarray) -> list[np.ndarray]:
    return [quarter for half in np.split(array, 2) for quarter in np.split(half, 2, axis=1)]
