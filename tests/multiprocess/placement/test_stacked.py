"""`stack`, `unstack` and the old device_put functions on real processes, compared with stock JAX."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import orbax_ext
from orbax_ext import lab
from tests.support.placement import (
    EXPLICIT,
    P,
    assert_holds,
    each_scope,
    error_of,
    make_mesh,
    no_programs,
    waits_for_process_1,
)


def state() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.linspace(-1, 1, 5).astype(jax.numpy.bfloat16),
        "step": np.int32(9),
        "name": "adam",
    }


def pmap_round_trip() -> None:
    """Stacks one copy, runs a pmap step and unstacks it, as pmap-era code does."""
    rows = jax.local_device_count()
    stacked = orbax_ext.stack(state())
    assert stacked["w"].shape == (rows, 3, 4)
    assert stacked["step"].shape == (rows,)
    assert stacked["name"] == "adam"
    arrays = {name: stacked[name] for name in ("w", "half", "step")}
    stepped = jax.pmap(lambda tree: jax.tree.map(lambda x: x + 1, tree))(arrays)
    with no_programs():
        one = orbax_ext.unstack(stepped)
    stock = jax.tree.map(lambda x: x[0], stepped)
    for name in arrays:
        expected = np.asarray(stock[name])
        assert expected.tobytes() == np.asarray(state()[name] + np.ones((), state()[name].dtype)).tobytes()
        assert one[name].sharding == stock[name].sharding  # a drop-in for x[0]
        assert_holds(one[name], expected)


def unstacked_by_one_process_alone() -> None:
    everywhere = orbax_ext.stack(state(), jax.devices())
    assert everywhere["w"].shape == (8, 3, 4)
    assert len(everywhere["w"].addressable_shards) == jax.local_device_count()
    if jax.process_index() != jax.process_count() - 1:
        return
    for _ in each_scope():
        with no_programs():
            one = orbax_ext.unstack(everywhere)
            again = orbax_ext.stack(state(), jax.devices())
        assert one["name"] == "adam"
        for name in ("w", "half", "step"):
            assert_holds(one[name], np.asarray(state()[name]))
            assert one[name].sharding.device_set == set(jax.devices())
            assert one[name].is_fully_replicated
            assert again[name].sharding == everywhere[name].sharding


def rows_that_are_sharded_too() -> None:
    mesh = make_mesh((EXPLICIT,) * 3)
    one = np.arange(24, dtype=np.float32).reshape(6, 4)
    stacked = orbax_ext.shard(np.broadcast_to(one, (4, 6, 4)), NamedSharding(mesh, P("b", None, "c")))
    placed = orbax_ext.unstack(stacked, check=True)
    assert placed.sharding == NamedSharding(mesh, P(None, "c"))
    assert_holds(placed, one)


def keys_weak_types_and_host_arrays() -> None:
    key = jax.random.key(5)
    stacked = orbax_ext.stack({"key": key, "weak": jax.numpy.asarray(1.5)}, jax.devices())
    assert stacked["key"].shape == (8,)
    assert stacked["key"].dtype == key.dtype
    assert stacked["weak"].weak_type
    one = orbax_ext.unstack(stacked, check=True)
    assert one["key"].dtype == key.dtype
    assert_holds(jax.random.key_data(one["key"]), np.asarray(jax.random.key_data(key)))
    assert one["weak"].weak_type
    host = np.broadcast_to(np.arange(3), (8, 3))
    assert orbax_ext.unstack({"host": host}, check=True)["host"].tolist() == [0, 1, 2]


def to_a_mesh_and_back() -> None:
    """Moves pmap's state to a global mesh without sending a byte between hosts."""
    stacked = orbax_ext.stack(state())
    mesh = make_mesh()
    with no_programs():
        moved = orbax_ext.replicate(orbax_ext.unstack(stacked), mesh)
        back = orbax_ext.stack(moved)
    assert_holds(moved["w"], state()["w"])
    assert_holds(back["w"], np.broadcast_to(state()["w"], (jax.local_device_count(), 3, 4)))
    total = jax.jit(lambda tree: tree["w"].sum())({"w": moved["w"]})
    assert float(total) == 66.0


def differing_copies() -> dict[str, str]:
    rank, last = jax.process_index(), jax.process_count() - 1
    odd = orbax_ext.stack({"w": np.full(3, float(rank == last), np.float32)})
    torn = {"w": orbax_ext.device_put_sharded([np.full(2, n) for n in range(8)], jax.devices())}
    return {
        "between processes": error_of(lambda: orbax_ext.unstack(odd, check=True)),
        "between devices": error_of(lambda: orbax_ext.unstack(torn, check=True)),
        "unchecked": error_of(lambda: orbax_ext.unstack(torn)),
    }


def not_stacked() -> dict[str, str]:
    mesh = make_mesh()
    return {
        "replicated": error_of(lambda: orbax_ext.unstack({"w": orbax_ext.replicate(np.zeros((8, 2)), mesh)})),
        "batch": error_of(
            lambda: orbax_ext.unstack({"w": orbax_ext.shard(np.zeros((16, 2)), NamedSharding(mesh, P("b")))})
        ),
        "scalar": error_of(lambda: orbax_ext.unstack({"w": orbax_ext.replicate(np.zeros(()), mesh)})),
        "host": error_of(lambda: orbax_ext.unstack(np.float32(1))),
        "devices": error_of(lambda: orbax_ext.stack(np.zeros(2), [])),
        "twice": error_of(lambda: orbax_ext.stack(np.zeros(2), [jax.local_devices()[0]] * 2)),
    }


def trees_for_device_put() -> list[Any]:
    return [np.arange(3.0), 3, 2.5, True, {"a": [np.ones((2, 2), np.int8), 1j], "b": None}, jax.numpy.asarray(4.0)]


def old_device_put() -> bool:
    """Compares with the stock functions if JAX still has them; returns whether it does."""
    local = jax.local_devices()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicated, sharded = getattr(jax, "device_put_replicated", None), getattr(jax, "device_put_sharded", None)
    for tree in trees_for_device_put():
        for ours, theirs, given in (
            (orbax_ext.device_put_replicated, replicated, tree),
            (orbax_ext.device_put_sharded, sharded, [tree] * len(local)),
        ):
            placed = ours(given, local)
            for leaf, one in zip(jax.tree.leaves(placed), jax.tree.leaves(tree), strict=True):
                assert leaf.shape == (len(local), *np.shape(one))
                row = np.asarray(jax.numpy.asarray(one))
                assert_holds(leaf, np.broadcast_to(row, leaf.shape))
                assert leaf.weak_type == jax.numpy.asarray(one).weak_type
            if theirs is not None:
                jax.tree.map(assert_same, placed, theirs(given, local))
    key = jax.random.key(1)
    placed = orbax_ext.device_put_sharded(list(jax.random.split(key, len(local))), local)
    expected = np.asarray(jax.random.key_data(jax.random.split(key, len(local))))
    assert np.asarray(jax.random.key_data(placed)).tobytes() == expected.tobytes()
    return replicated is not None


def assert_same(ours: jax.Array, theirs: jax.Array) -> None:
    assert (ours.shape, ours.dtype, ours.weak_type, ours.sharding) == (
        theirs.shape,
        theirs.dtype,
        theirs.weak_type,
        theirs.sharding,
    )
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def across_processes() -> None:
    """Uses the devices of all processes, which the stock functions refuse."""
    many = orbax_ext.device_put_replicated({"w": np.arange(3.0)}, jax.devices())
    assert_holds(many["w"], np.broadcast_to(np.arange(3, dtype=np.float32), (8, 3)))
    rows = orbax_ext.device_put_sharded([np.full(2, n, np.int32) for n in range(8)], jax.devices())
    assert_holds(rows, np.repeat(np.arange(8, dtype=np.int32), 2).reshape(8, 2))


def bad_device_put() -> dict[str, str]:
    local = jax.local_devices()
    no_sequence: Any = {1, 2}
    return {
        "string": error_of(lambda: orbax_ext.device_put_replicated({"a": "x"}, local)),
        "no devices": error_of(lambda: orbax_ext.device_put_replicated(1, [])),
        "no sequence": error_of(lambda: orbax_ext.device_put_sharded(no_sequence, local)),
        "too many": error_of(lambda: orbax_ext.device_put_sharded([1] * (len(local) + 1), local)),
        "shapes": error_of(lambda: orbax_ext.device_put_sharded([np.zeros(n) for n in range(8)], jax.devices())),
    }


def stock_row_waits() -> bool:
    everywhere = orbax_ext.stack(np.arange(7.0), jax.devices())
    return waits_for_process_1("x[0]", lambda: np.asarray(everywhere[0]))


def our_row_waits() -> bool:
    everywhere = orbax_ext.stack(np.arange(7.0), jax.devices())
    return waits_for_process_1("unstack", lambda: np.asarray(orbax_ext.unstack(everywhere)), patience=30.0)


def row_to_a_local_device() -> tuple[str, str]:
    """Moves x[0] to a device of this host, where pmap's own x[0] was; returns the errors of stock and ours."""
    everywhere = orbax_ext.stack(np.arange(3.0), jax.devices())
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    # GPUs and TPUs can send between hosts; CPUs can after an address is set.
    jax.config.update("jax_cross_host_transfer_socket_address", "127.0.0.1:0")
    try:
        stock = error_of(lambda: jax.device_put(everywhere[0], here))
        ours = error_of(lambda: orbax_ext.match_sharding(orbax_ext.unstack(everywhere), here).block_until_ready())
    finally:
        jax.config.update("jax_cross_host_transfer_socket_address", "")
    return stock, ours


def other_devices_into_pmap() -> tuple[str, str]:
    """Gives pmap rows in another order of devices, which it moved itself before JAX 0.8."""
    local = jax.local_devices()
    turned = orbax_ext.stack(np.arange(3.0), local[::-1])
    whole = NamedSharding(Mesh(np.array(local), ("d",)), P())
    same = jax.device_put(np.zeros((len(local), 3)), whole)
    good = orbax_ext.stack(np.arange(3.0), local)
    stock = error_of(lambda: jax.pmap(lambda x, y: x + y)(turned, same))
    matched = orbax_ext.match_sharding((turned, same), (good, good))
    ours = error_of(lambda: jax.pmap(lambda x, y: x + y)(*matched).block_until_ready())
    return stock, ours


@pytest.mark.parametrize(
    "scenario",
    [
        pmap_round_trip,
        unstacked_by_one_process_alone,
        rows_that_are_sharded_too,
        keys_weak_types_and_host_arrays,
        to_a_mesh_and_back,
        across_processes,
    ],
    ids=lambda scenario: scenario.__name__.replace("_", "-"),
)
def test_a_scenario_stacks_and_unstacks_copies_in_place(cluster: lab.Cluster, scenario: Any) -> None:
    cluster.run(scenario)


def test_indexing_waits_for_the_other_processes_and_unstack_does_not(several: lab.Cluster) -> None:
    """Stock: x[0] of a global stacked array is a program across hosts on JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    assert all(several.run(stock_row_waits))
    assert [waited for rank, waited in enumerate(several.run(our_row_waits)) if rank != 1] == [False] * (
        several.processes - 1
    )


def test_an_indexed_row_does_not_reach_a_local_device_but_an_unstacked_one_does(several: lab.Cluster) -> None:
    """Stock: JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    for stock, ours in several.run(row_to_a_local_device):
        assert "CopyArrays only supports destination device list of the same size" in stock
        assert ours == ""


def test_pmap_refuses_rows_on_other_devices_and_match_sharding_fixes_them(cluster: lab.Cluster) -> None:
    """Stock: JAX 0.9.0, 0.10.2 and 0.12.0.1, with a message that depends on release and number of processes."""
    if cluster.devices == 1:
        pytest.skip("a single device has no other order")
    for stock, ours in cluster.run(other_devices_into_pmap):
        assert "incompatible devices" in stock or "does not match the sharding" in stock or "exactly one shard" in stock
        assert ours == ""


def test_device_put_replicated_and_sharded_equal_those_of_jax(cluster: lab.Cluster) -> None:
    """Stock: still there, deprecated, on JAX 0.9.0; gone on 0.10.2 and 0.12.0.1."""
    has_stock = set(cluster.run(old_device_put))
    assert has_stock == {jax.__version_info__ < (0, 10)}


def test_device_put_replicated_and_sharded_explain_bad_arguments(cluster: lab.Cluster) -> None:
    for errors in cluster.run(bad_device_put):
        assert errors["string"].startswith("TypeError: device_put_replicated: leaf a: expected an array or a number")
        assert "expected a sequence of one or more different devices" in errors["no devices"]
        assert errors["no sequence"].startswith("TypeError: device_put_sharded: expected a sequence")
        assert (
            f"expected a shard for each of {cluster.devices} devices, found {cluster.devices + 1}" in errors["too many"]
        )
        assert "expected shards of one shape and dtype" in errors["shapes"]


def test_unstack_with_check_names_the_rows_that_differ(cluster: lab.Cluster) -> None:
    last = cluster.processes - 1
    for errors in cluster.run(differing_copies):
        if last:
            assert errors["between processes"].startswith("DataMismatchError: unstack")
            assert "leaf w: expected rows of shape (3,)" in errors["between processes"]
            assert f"process {last} (" in errors["between processes"]
        if cluster.devices > 1:
            assert "leaf w on process 0 (" in errors["between devices"]
            assert "expected equal rows, found different ones on" in errors["between devices"]
        assert "DataMismatchError" in errors["between devices"]
        assert errors["unchecked"] == ""


def test_unstack_refuses_arrays_that_are_not_stacked(cluster: lab.Cluster) -> None:
    for errors in cluster.run(not_stacked):
        for name in ("replicated", "batch", "scalar"):
            assert "unstack: leaf w: expected a leading axis with one row per device, found shape" in errors[name]
        assert "unstack: leaf (the whole tree): expected a leading axis" in errors["host"]
        assert "different devices" in errors["devices"]
        assert "different devices" in errors["twice"]
