"""stack, unstack and the old device_put functions on real processes, beside what stock JAX does."""

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
    make_mesh,
    no_programs,
    said_by,
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
    """From one copy to pmap's state, a step, and back, as pmap-era code does it."""
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


def rows_that_are_cut_up_further() -> None:
    mesh = make_mesh((EXPLICIT,) * 3)
    one = np.arange(24, dtype=np.float32).reshape(6, 4)
    stacked = orbax_ext.shard(np.broadcast_to(one, (4, 6, 4)), NamedSharding(mesh, P("b", None, "c")))
    found = orbax_ext.unstack(stacked, check=True)
    assert found.sharding == NamedSharding(mesh, P(None, "c"))
    assert_holds(found, one)


def keys_and_their_kin() -> None:
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
    """The migration itself: pmap's state to a global mesh without a byte between hosts."""
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
        "between processes": said_by(lambda: orbax_ext.unstack(odd, check=True)),
        "between devices": said_by(lambda: orbax_ext.unstack(torn, check=True)),
        "unchecked": said_by(lambda: orbax_ext.unstack(torn)),
    }


def not_stacked() -> dict[str, str]:
    mesh = make_mesh()
    return {
        "replicated": said_by(lambda: orbax_ext.unstack({"w": orbax_ext.replicate(np.zeros((8, 2)), mesh)})),
        "batch": said_by(
            lambda: orbax_ext.unstack({"w": orbax_ext.shard(np.zeros((16, 2)), NamedSharding(mesh, P("b")))})
        ),
        "scalar": said_by(lambda: orbax_ext.unstack({"w": orbax_ext.replicate(np.zeros(()), mesh)})),
        "host": said_by(lambda: orbax_ext.unstack(np.float32(1))),
        "devices": said_by(lambda: orbax_ext.stack(np.zeros(2), [])),
        "twice": said_by(lambda: orbax_ext.stack(np.zeros(2), [jax.local_devices()[0]] * 2)),
    }


def trees_for_device_put() -> list[Any]:
    return [np.arange(3.0), 3, 2.5, True, {"a": [np.ones((2, 2), np.int8), 1j], "b": None}, jax.numpy.asarray(4.0)]


def old_device_put() -> bool:
    """Compares with the stock functions where they still are; says whether that was so."""
    local = jax.local_devices()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicated, sharded = getattr(jax, "device_put_replicated", None), getattr(jax, "device_put_sharded", None)
    for tree in trees_for_device_put():
        for ours, theirs, given in (
            (orbax_ext.device_put_replicated, replicated, tree),
            (orbax_ext.device_put_sharded, sharded, [tree] * len(local)),
        ):
            found = ours(given, local)
            for leaf, one in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
                assert leaf.shape == (len(local), *np.shape(one))
                row = np.asarray(jax.numpy.asarray(one))
                assert_holds(leaf, np.broadcast_to(row, leaf.shape))
                assert leaf.weak_type == jax.numpy.asarray(one).weak_type
            if theirs is not None:
                jax.tree.map(assert_same, found, theirs(given, local))
    key = jax.random.key(1)
    found = orbax_ext.device_put_sharded(list(jax.random.split(key, len(local))), local)
    expected = np.asarray(jax.random.key_data(jax.random.split(key, len(local))))
    assert np.asarray(jax.random.key_data(found)).tobytes() == expected.tobytes()
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
    """What the stock functions refuse: the devices of all processes."""
    many = orbax_ext.device_put_replicated({"w": np.arange(3.0)}, jax.devices())
    assert_holds(many["w"], np.broadcast_to(np.arange(3, dtype=np.float32), (8, 3)))
    each = orbax_ext.device_put_sharded([np.full(2, n, np.int32) for n in range(8)], jax.devices())
    assert_holds(each, np.repeat(np.arange(8, dtype=np.int32), 2).reshape(8, 2))


def bad_device_put() -> dict[str, str]:
    local = jax.local_devices()
    no_sequence: Any = {1, 2}
    return {
        "string": said_by(lambda: orbax_ext.device_put_replicated({"a": "x"}, local)),
        "no devices": said_by(lambda: orbax_ext.device_put_replicated(1, [])),
        "no sequence": said_by(lambda: orbax_ext.device_put_sharded(no_sequence, local)),
        "too many": said_by(lambda: orbax_ext.device_put_sharded([1] * (len(local) + 1), local)),
        "shapes": said_by(lambda: orbax_ext.device_put_sharded([np.zeros(n) for n in range(8)], jax.devices())),
    }


def stock_row_waits() -> bool:
    everywhere = orbax_ext.stack(np.arange(7.0), jax.devices())
    return waits_for_process_1("x[0]", lambda: np.asarray(everywhere[0]))


def our_row_waits() -> bool:
    everywhere = orbax_ext.stack(np.arange(7.0), jax.devices())
    return waits_for_process_1("unstack", lambda: np.asarray(orbax_ext.unstack(everywhere)))


def row_to_a_local_device() -> tuple[str, str]:
    """x[0], and on to a device of this host: what pmap's own x[0] was."""
    everywhere = orbax_ext.stack(np.arange(3.0), jax.devices())
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    # GPUs and TPUs can send between hosts; on CPU the way there is opened by naming an address.
    jax.config.update("jax_cross_host_transfer_socket_address", "127.0.0.1:0")
    try:
        stock = said_by(lambda: jax.device_put(everywhere[0], here))
        ours = said_by(lambda: orbax_ext.match_sharding(orbax_ext.unstack(everywhere), here).block_until_ready())
    finally:
        jax.config.update("jax_cross_host_transfer_socket_address", "")
    return stock, ours


def other_devices_into_pmap() -> tuple[str, str]:
    """Rows in another order of devices, which pmap before 0.8 moved to where it wanted them."""
    local = jax.local_devices()
    turned = orbax_ext.stack(np.arange(3.0), local[::-1])
    whole = NamedSharding(Mesh(np.array(local), ("d",)), P())
    same = jax.device_put(np.zeros((len(local), 3)), whole)
    good = orbax_ext.stack(np.arange(3.0), local)
    stock = said_by(lambda: jax.pmap(lambda x, y: x + y)(turned, same))
    matched = orbax_ext.match_sharding((turned, same), (good, good))
    ours = said_by(lambda: jax.pmap(lambda x, y: x + y)(*matched).block_until_ready())
    return stock, ours


@pytest.mark.parametrize(
    "scenario",
    [
        pmap_round_trip,
        unstacked_by_one_process_alone,
        rows_that_are_cut_up_further,
        keys_and_their_kin,
        to_a_mesh_and_back,
        across_processes,
    ],
    ids=lambda scenario: scenario.__name__.replace("_", "-"),
)
def test_copies_are_stacked_and_unstacked_where_they_are(cluster: lab.Cluster, scenario: Any) -> None:
    cluster.run(scenario)


def test_the_first_row_waits_for_the_other_processes_and_unstack_does_not(several: lab.Cluster) -> None:
    """Stock: x[0] of a global stacked array is a program across hosts on JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    assert all(several.run(stock_row_waits))
    assert [waited for rank, waited in enumerate(several.run(our_row_waits)) if rank != 1] == [False] * (
        several.processes - 1
    )


def test_the_first_row_does_not_reach_a_local_device_but_unstack_does(several: lab.Cluster) -> None:
    """Stock: JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    for stock, ours in several.run(row_to_a_local_device):
        assert "CopyArrays only supports destination device list of the same size" in stock
        assert ours == ""


def test_pmap_refuses_rows_on_other_devices_and_match_sharding_mends_them(cluster: lab.Cluster) -> None:
    """Stock: JAX 0.9.0, 0.10.2 and 0.12.0.1, in words that depend on release and number of processes."""
    if cluster.devices == 1:
        pytest.skip("a single device has no other order")
    for stock, ours in cluster.run(other_devices_into_pmap):
        assert "incompatible devices" in stock or "does not match the sharding" in stock or "exactly one shard" in stock
        assert ours == ""


def test_device_put_replicated_and_sharded_are_as_they_were(cluster: lab.Cluster) -> None:
    """Stock: still there, deprecated, on JAX 0.9.0; gone on 0.10.2 and 0.12.0.1."""
    there = set(cluster.run(old_device_put))
    assert there == {jax.__version_info__ < (0, 10)}


def test_device_put_replicated_and_sharded_say_what_is_wrong(cluster: lab.Cluster) -> None:
    for said in cluster.run(bad_device_put):
        assert said["string"].startswith("TypeError: device_put_replicated: leaf a: expected an array or a number")
        assert "expected a sequence of one or more different devices" in said["no devices"]
        assert said["no sequence"].startswith("TypeError: device_put_sharded: expected a sequence")
        assert (
            f"expected a shard for each of {cluster.devices} devices, found {cluster.devices + 1}" in said["too many"]
        )
        assert "expected shards of one shape and dtype" in said["shapes"]


def test_unstack_with_check_names_what_differs(cluster: lab.Cluster) -> None:
    last = cluster.processes - 1
    for said in cluster.run(differing_copies):
        if last:
            assert said["between processes"].startswith("DataMismatchError: unstack")
            assert "leaf w: expected rows of shape (3,)" in said["between processes"]
            assert f"process {last} (" in said["between processes"]
        if cluster.devices > 1:
            assert "leaf w on process 0 (" in said["between devices"]
            assert "expected equal rows, found different ones on" in said["between devices"]
        assert "DataMismatchError" in said["between devices"]
        assert said["unchecked"] == ""


def test_unstack_refuses_what_is_not_stacked(cluster: lab.Cluster) -> None:
    for said in cluster.run(not_stacked):
        for name in ("replicated", "batch", "scalar"):
            assert "unstack: leaf w: expected a leading axis with one row to a device, found shape" in said[name]
        assert "unstack: leaf (the whole tree): expected a leading axis" in said["host"]
        assert "different devices" in said["devices"]
        assert "different devices" in said["twice"]
