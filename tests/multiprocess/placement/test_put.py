"""`replicate`, `shard` and `stitch` on real processes."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import orbax_ext
from orbax_ext import lab
from tests.support.placement import (
    P,
    assert_holds,
    each_scope,
    error_of,
    make_mesh,
    no_programs,
    some_keys,
    waits_for_process_1,
)

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4", "int2", "uint2"),
]


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns values with arbitrary bits, among them negative zeros, denormals and NaNs with a payload."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    count = int(np.prod(shape))
    if dtype in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn", "bool"):
        return (np.arange(count) % 2).astype(kind).reshape(shape)
    random = np.random.default_rng(0).integers(0, 256, (count * kind.itemsize,), np.uint8)
    return random.view(kind).reshape(shape)


def placed_by_one_process_alone() -> None:
    if jax.process_index() != jax.process_count() - 1:
        return  # the other processes never make these calls: a collective would wait for them
    host: dict[str, Any] = {"w": values("float32", (8, 6)), "step": np.int32(7), "n": np.float64(0.5)}
    mesh = make_mesh()
    rows = len(jax.local_devices())
    for _ in each_scope():
        with no_programs():
            same = orbax_ext.replicate(host, mesh)
            cut = orbax_ext.shard(host, {"w": NamedSharding(mesh, P("b", "c")), "step": same["step"], "n": same["n"]})
            own = orbax_ext.stitch(host["w"][:rows], NamedSharding(mesh, P(("b", "c"))))
        assert same["w"].sharding == NamedSharding(mesh, P())
        assert cut["w"].sharding == NamedSharding(mesh, P("b", "c"))
        assert_holds(same["w"], host["w"])
        assert_holds(same["step"], np.asarray(host["step"]))
        assert_holds(same["n"], np.asarray(0.5, np.float32))
        assert_holds(cut["w"], host["w"])
        assert own.shape == (8, 6)


def every_dtype() -> None:
    mesh = make_mesh()
    host = {dtype: values(dtype, (8, 4)) for dtype in DTYPES}
    for memory in ("device", "pinned_host"):
        same = orbax_ext.replicate(host, mesh, memory_kind=memory)
        cut = orbax_ext.shard(host, NamedSharding(mesh, P("c", ("a", "b")), memory_kind=memory))
        for dtype, expected in host.items():
            assert_holds(same[dtype], expected)
            assert_holds(cut[dtype], expected)
            assert {shard.data.sharding.memory_kind for shard in cut[dtype].addressable_shards} == {memory}
            assert same[dtype].sharding.memory_kind == memory


def odd_leaves() -> None:
    mesh = make_mesh()
    marker = object()
    tree = {
        "name": "adam",
        "none": None,
        "number": 3,
        "flag": True,
        "marker": marker,
        "words": np.array(["a", "b"]),
        "empty": np.zeros((0, 4), np.float32),
        "strided": np.arange(64, dtype=np.float32).reshape(8, 8).T,
        "weak": jax.numpy.asarray(2.0),
    }
    placed = orbax_ext.replicate(tree, mesh)
    for name in ("name", "none", "number", "flag", "marker", "words"):
        assert placed[name] is tree[name], name
    assert placed["empty"].shape == (0, 4)
    assert_holds(placed["strided"], np.ascontiguousarray(tree["strided"]))
    assert placed["weak"].weak_type
    assert placed["weak"].sharding == NamedSharding(mesh, P())


def keys() -> None:
    mesh = make_mesh()
    for impl in ("threefry2x32", "rbg"):
        many = some_keys(impl)
        one = jax.random.wrap_key_data(np.asarray(jax.random.key_data(many))[3], impl=impl)
        for _ in each_scope():
            with no_programs():
                placed = orbax_ext.replicate({"one": one, "many": many}, mesh)
                cut = orbax_ext.shard(many, NamedSharding(mesh, P("b")))
            assert placed["one"].dtype == one.dtype
            assert cut.dtype == many.dtype
            assert cut.shape == (8,)
            assert cut.sharding == NamedSharding(mesh, P("b"))
            assert_holds(jax.random.key_data(placed["one"]), np.asarray(jax.random.key_data(one)))
            assert_holds(jax.random.key_data(cut), np.asarray(jax.random.key_data(many)))


def arrays_as_input() -> None:
    mesh = make_mesh()
    host = values("float32", (8, 6))
    local = jax.device_put(host, jax.local_devices()[-1])
    spread = jax.device_put(host, NamedSharding(Mesh(np.array(jax.local_devices()), ("l",)), P("l")))
    same = orbax_ext.replicate(local, mesh)
    assert_holds(same, host)
    assert_holds(orbax_ext.shard(spread, NamedSharding(mesh, P("c"))), host)
    with no_programs():
        again = orbax_ext.replicate(same, mesh)  # from a global array that every process has a copy of
        cut = orbax_ext.shard(same, NamedSharding(mesh, P("b", "c")))
    assert_holds(again, host)
    assert_holds(cut, host)
    here = orbax_ext.replicate(same, Mesh(np.array(jax.local_devices()), ("l",)))  # global to local
    assert_holds(here, host)
    if jax.process_count() > 1:
        error = error_of(lambda: orbax_ext.replicate({"w": cut}, mesh))
        assert error.startswith("ValueError: replicate: leaf w is spread over several processes")
        assert "match_sharding" in error


def on_some_processes_only() -> None:
    """Processes without devices in the mesh get arrays of which they hold nothing."""
    mesh = Mesh(np.array([device for device in jax.devices() if device.process_index == 0]), ("x",))
    inside = jax.process_index() == 0
    host = {"w": np.arange(8, dtype=np.float32) if inside else np.zeros(8, np.float32), "key": jax.random.key(1)}
    for placed in (orbax_ext.replicate(host, mesh), orbax_ext.replicate(host, mesh, check=True)):
        assert placed["w"].shape == (8,)
        assert placed["w"].sharding == NamedSharding(mesh, P())
        assert bool(placed["w"].addressable_shards) == inside
        if inside:
            assert_holds(placed["w"], host["w"])
    stacked = orbax_ext.stack(host, list(mesh.devices.flat))
    assert stacked["w"].shape == (mesh.size, 8)
    assert orbax_ext.unstack(stacked)["w"].shape == (8,)
    if not inside:
        error = error_of(lambda: orbax_ext.stitch(host["w"], NamedSharding(mesh, P("x"))))
        assert "none of this process's devices is in the sharding" in error


def usable_in_a_program() -> None:
    mesh = make_mesh()
    host = np.arange(48, dtype=np.float32).reshape(8, 6)
    cut = orbax_ext.shard(host, NamedSharding(mesh, P(("b", "c"))))
    same = orbax_ext.replicate(host, mesh)
    total = jax.jit(lambda x, y: (x * y).sum(), out_shardings=NamedSharding(mesh, P()))(cut, same)
    assert float(total) == float((host * host).sum())


def stitched_from_parts() -> None:
    mesh = make_mesh()
    host = values("bfloat16", (16, 8))
    for spec in (P("b"), P("c", "b"), P(None, ("b", "c")), P(), P("a", "c")):
        sharding = NamedSharding(mesh, spec)
        boxes = list(sharding.addressable_devices_indices_map(host.shape).values())
        rows = sorted({row for box in boxes for row in range(16)[box[0]]})
        columns = sorted({column for box in boxes for column in range(8)[box[1]]})
        part = host[np.ix_(rows, columns)]
        for _ in each_scope():
            with no_programs():
                placed = orbax_ext.stitch({"x": part, "note": "kept"}, {"x": sharding, "note": None})
            assert placed["note"] == "kept"
            assert placed["x"].sharding == sharding
            assert_holds(placed["x"], host)
        exact = orbax_ext.stitch(part, jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=sharding), check=True)
        assert_holds(exact, host)
    here = jax.random.split(jax.random.key(jax.process_index()), 8 // jax.process_count())
    spread = orbax_ext.stitch(here, NamedSharding(mesh, P(("b", "c"))))
    assert spread.shape == (8,)
    mine = np.concatenate([np.asarray(jax.random.key_data(shard.data)) for shard in spread.addressable_shards])
    assert mine.tobytes() == np.asarray(jax.random.key_data(here)).tobytes()


def parts_that_do_not_fit() -> dict[str, str]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    rows = jax.local_device_count()
    whole = jax.ShapeDtypeStruct((16, 3), np.float32, sharding=sharding)
    last = jax.process_index() == jax.process_count() - 1
    return {
        "ragged": error_of(lambda: orbax_ext.stitch({"x": np.zeros((rows + 1, 3))}, sharding)),
        "short": error_of(lambda: orbax_ext.stitch({"x": np.zeros((rows, 3), np.float32)}, {"x": whole})),
        "dtype": error_of(lambda: orbax_ext.stitch({"x": np.zeros((2 * rows, 3), np.int32)}, {"x": whole})),
        "others": error_of(
            lambda: orbax_ext.stitch({"x": np.zeros((rows * (3 if last else 2), 3))}, sharding, check=True)
        ),
    }


def a_box_with_a_hole() -> str:
    """Puts two processes on the diagonals of a 2 x 2 mesh: what each holds is not one array."""
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    half = len(devices) // 2
    table = np.array([[devices[0], devices[half]], [devices[half + 1], devices[1]]])
    sharding = NamedSharding(Mesh(table, ("x", "y")), P("x", "y"))
    return error_of(lambda: orbax_ext.stitch(np.zeros((2, 2)), sharding))


def checked(odd: int | None) -> str:
    host: dict[str, Any] = {"layer": [np.arange(6, dtype=np.float32), np.zeros(3)], "n": 3}
    if jax.process_index() == odd:
        host["layer"][1] = np.array([0.0, -0.0, 0.0])  # equal to ==, not in bits
    mesh = make_mesh()
    error = error_of(lambda: orbax_ext.replicate(host, mesh, check=True))
    again = error_of(lambda: orbax_ext.shard(host, NamedSharding(mesh, P()), check=True))
    assert again.replace("shard:", "replicate:") == error
    return error


def checked_structure() -> str:
    host = {"w": np.zeros(4, np.float32)}
    if jax.process_index() == 1:
        host = {"w": np.zeros(4, np.float32), "x": np.zeros(2, np.float32)}
    return error_of(lambda: orbax_ext.replicate(host, make_mesh(), check=True))


def checked_many(leaves: int) -> str:
    """Compares more leaves than one message holds; the difference is near the end."""
    host = [np.float32(number) for number in range(leaves)]
    if jax.process_index() == jax.process_count() - 1:
        host[leaves - 2] = np.float32(-1)
    return error_of(lambda: orbax_ext.replicate(host, make_mesh(), check=True))


def bad_arguments() -> dict[str, str]:
    mesh = make_mesh()
    host = {"w": np.zeros((6, 3), np.float32)}
    return {
        "mesh": error_of(lambda: orbax_ext.replicate(host, NamedSharding(mesh, P()))),
        "shape": error_of(lambda: orbax_ext.shard(host, NamedSharding(mesh, P("b")))),
        "tree": error_of(lambda: orbax_ext.shard(host, {"v": NamedSharding(mesh, P("b"))})),
        "none": error_of(lambda: orbax_ext.shard(host, {"w": None})),
        "traced": error_of(lambda: jax.jit(lambda x: orbax_ext.replicate(x, mesh))(host["w"])),
    }


def stock_device_put_waits() -> bool:
    sharding = NamedSharding(make_mesh(), P())
    return waits_for_process_1("device_put", lambda: jax.device_put(np.arange(5.0), sharding).block_until_ready())


def ours_waits() -> bool:
    mesh = make_mesh()
    return waits_for_process_1(
        "replicate", lambda: orbax_ext.replicate(np.arange(5.0), mesh).block_until_ready(), patience=30.0
    )


def unequal_parts() -> tuple[tuple[int, ...], str]:
    """Gives the last process more rows than the others; returns the global shape of stock JAX, and our error."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    last = jax.process_index() == jax.process_count() - 1
    part = np.zeros((jax.local_device_count() * (3 if last else 2), 3), np.float32)
    stock = jax.make_array_from_process_local_data(sharding, part)
    return stock.shape, error_of(lambda: orbax_ext.stitch(part, sharding, check=True))


def parts_on_every_local_device() -> str:
    """Stitches parts of which each host has a whole copy on each of its devices; returns the error of stock JAX."""
    from jax.experimental import multihost_utils

    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = jax.local_device_count()
    part = orbax_ext.replicate(np.full((rows, 2), jax.process_index()), Mesh(np.array(jax.local_devices()), ("l",)))
    stock = error_of(lambda: multihost_utils.host_local_array_to_global_array(part, mesh, P("x")))
    placed = orbax_ext.stitch(part, NamedSharding(mesh, P("x")))
    assert_holds(placed, np.repeat(np.arange(jax.process_count(), dtype=np.int32), 2 * rows).reshape(-1, 2))
    return stock


def peak_memory(way: str) -> int:
    from bench import placement

    return placement.measure(way, 16)


@pytest.mark.parametrize(
    "scenario",
    [
        placed_by_one_process_alone,
        every_dtype,
        odd_leaves,
        keys,
        arrays_as_input,
        on_some_processes_only,
        usable_in_a_program,
        stitched_from_parts,
    ],
    ids=lambda scenario: scenario.__name__.replace("_", "-"),
)
def test_a_scenario_places_each_process_s_own_part(cluster: lab.Cluster, scenario: Any) -> None:
    cluster.run(scenario)


def test_device_put_waits_for_the_other_processes_and_replicate_does_not(several: lab.Cluster) -> None:
    """Stock: JAX 0.9.0, 0.10.2 and 0.12.0.1 all compare the hosts' copies with a collective."""
    stock = several.run(stock_device_put_waits)
    ours = several.run(ours_waits)
    assert all(stock)
    assert [waited for rank, waited in enumerate(ours) if rank != 1] == [False] * (several.processes - 1)


def test_replicate_does_not_need_more_memory_with_more_processes_as_device_put_does(cluster: lab.Cluster) -> None:
    """Stock: JAX 0.9.0, 0.10.2 and 0.12.0.1; `make bench-placement` prints the table."""
    size = 16 << 20
    stock = max(cluster.run(peak_memory, "device_put"))
    ours = [max(cluster.run(peak_memory, "replicate")) for _ in range(3)]
    assert min(ours) < 1.5 * size  # what else the machine does can only add to a peak
    if cluster.processes > 1:
        assert stock > cluster.processes * size


def test_stitch_names_the_part_that_does_not_fit(cluster: lab.Cluster) -> None:
    rows = cluster.devices
    for rank, errors in enumerate(cluster.run(parts_that_do_not_fit)):
        if rows > 1:
            assert f"leaf x on process {rank} (" in errors["ragged"]
            assert f"multiple of ({rows}, 1)" in errors["ragged"]
            assert f"found ({rows + 1}, 3)" in errors["ragged"]
        assert f"leaf x on process {rank} (" in errors["short"]
        assert f"expected the local shape ({2 * rows}, 3)" in errors["short"]
        assert f"found ({rows}, 3)" in errors["short"]
        assert "expected the dtype float32, found int32" in errors["dtype"]
        if cluster.processes > 1:
            last = cluster.processes - 1
            assert errors["others"].startswith("DataMismatchError: stitch")
            assert "expected global shape (16, 3)" in errors["others"]
            assert f"process {last} (" in errors["others"]
            assert f"found global shape (24, 3), dtype float64 (local shape ({3 * rows}, 3))" in errors["others"]


def test_check_refuses_unequal_parts_which_stock_gives_different_global_shapes(several: lab.Cluster) -> None:
    """Stock: make_array_from_process_local_data on JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    results = several.run(unequal_parts)
    assert {shape for shape, _ in results} == {(16, 3), (24, 3)}  # one array with two shapes
    assert all(f"process {several.processes - 1} (" in error and "(24, 3)" in error for _, error in results)


def test_parts_on_several_local_devices_are_stitched(several: lab.Cluster) -> None:
    """Stock: host_local_array_to_global_array on JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    if several.devices == 1:
        pytest.skip("needs several devices on a process")
    for stock in several.run(parts_on_every_local_device):
        assert "exactly one shard" in stock


def test_stitch_refuses_parts_that_are_not_one_box(several: lab.Cluster) -> None:
    if several.processes > 2:
        pytest.skip("shown by two processes")
    assert all("do not form one box" in error for error in several.run(a_box_with_a_hole))


def test_check_passes_if_all_processes_hold_the_same(cluster: lab.Cluster) -> None:
    assert set(cluster.run(checked, None)) == {""}


def test_check_names_the_process_and_the_leaf_on_all_processes(several: lab.Cluster) -> None:
    odd = several.processes - 1
    (error,) = set(several.run(checked, odd))
    assert error.startswith("DataMismatchError: replicate: processes hold different data")
    assert "leaf layer/1: expected shape (3,), dtype float64, digest " in error
    assert f"process {odd} (" in error
    assert "layer/0" not in error


def test_check_names_the_process_with_another_structure(several: lab.Cluster) -> None:
    (error,) = set(several.run(checked_structure))
    assert "leaf x: expected" in error
    assert "no such leaf" in error
    assert "process 1 (" in error


def test_check_finds_one_leaf_among_thousands(several: lab.Cluster) -> None:
    (error,) = set(several.run(checked_many, 1200))
    assert "leaf 1198: expected" in error
    assert f"process {several.processes - 1} (" in error


def test_bad_arguments_say_expected_and_found(cluster: lab.Cluster) -> None:
    for rank, errors in enumerate(cluster.run(bad_arguments)):
        assert errors["mesh"] == "ValueError: replicate: expected a jax.sharding.Mesh of devices, found NamedSharding."
        assert f"shard: leaf w on process {rank}: expected a shape that" in errors["shape"]
        assert "found (6, 3)" in errors["shape"]
        assert "expected shardings with the structure of the tree" in errors["tree"]
        assert "leaf w: expected a Sharding or something that has one, found None" in errors["none"]
        assert "found inside jit, expected outside of it" in errors["traced"]
