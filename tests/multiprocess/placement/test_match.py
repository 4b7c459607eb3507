"""`match_sharding` on real processes: auto, explicit and mixed axes, in and outside of jit."""

from __future__ import annotations

import itertools
import pathlib
import re
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import orbax_ext
from orbax_ext import lab
from tests.support.placement import (
    AUTO,
    EXPLICIT,
    P,
    assert_holds,
    each_scope,
    error_of,
    make_mesh,
    no_programs,
    pointers,
    scope,
    some_keys,
)

TYPES = {
    "auto": (AUTO, AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT, EXPLICIT),
    "mixed": (AUTO, EXPLICIT, AUTO),
}
SPELLINGS = [P("b"), P("b", None), P(("a", "b")), P("b", "a"), P(("b",), "a")]  # a has size 1
LAYOUTS = [P(), P("b"), P(None, "b"), P("c", "b"), P(("b", "c")), P(None, ("a", "b"))]
HOST = np.arange(64, dtype=np.float32).reshape(8, 8)
COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast")


def spelled_differently(types: Any) -> None:
    mesh = make_mesh(types)
    keys = orbax_ext.shard(some_keys(), NamedSharding(mesh, P("b")))
    for source, target in itertools.product(SPELLINGS, SPELLINGS):
        x = {"x": orbax_ext.shard(HOST, NamedSharding(mesh, source)), "key": keys}
        like = {"x": NamedSharding(mesh, target), "key": NamedSharding(mesh, P(("a", "b")))}
        with no_programs():
            matched = orbax_ext.match_sharding(x, like)
        assert str(matched["x"].sharding.spec) == str(target)
        assert matched["x"].sharding == like["x"]
        assert pointers(matched["x"]) == pointers(x["x"])  # the same buffers
        assert matched["key"].sharding.spec == P(("a", "b"))
        assert orbax_ext.canonical_spec(matched["x"].sharding) == orbax_ext.canonical_spec(x["x"].sharding) == P("b")
        again = orbax_ext.match_sharding(matched, like)
        assert again["x"] is matched["x"]


def other_mesh_same_place() -> None:
    """The other mesh has another order of devices, but puts every part on the device where it already is."""
    mesh = make_mesh()
    turned = Mesh(np.array(jax.devices()).reshape(4, 2).T, ("q", "r"), axis_types=(EXPLICIT, EXPLICIT))
    x = orbax_ext.shard(HOST, NamedSharding(mesh, P("b", "c")))
    with no_programs():
        matched = orbax_ext.match_sharding(x, NamedSharding(turned, P("r", "q")))
    assert matched.sharding == NamedSharding(turned, P("r", "q"))
    assert pointers(matched) == pointers(x)
    assert_holds(matched, HOST)


def moved_outside_jit(types: Any) -> None:
    mesh = make_mesh(types)
    like = [orbax_ext.shard(HOST, NamedSharding(mesh, spec)) for spec in LAYOUTS]
    matched = orbax_ext.match_sharding(like, like[1:] + like[:1])
    for moved, target in zip(matched, like[1:] + like[:1], strict=True):
        assert moved.sharding == target.sharding
        assert_holds(moved, HOST)


def moved_under_any_scope() -> None:
    """Stock: device_put fails under a set_mesh of other devices, or of the same ones in another order."""
    turned = Mesh(np.array(jax.devices()[::-1]), ("r",))
    x = orbax_ext.shard(HOST, NamedSharding(make_mesh(), P("b")))
    target = NamedSharding(turned, P("r"))
    stock = {}
    for name in each_scope():
        assert_holds(orbax_ext.match_sharding(x, target), HOST)
        stock[name] = error_of(lambda: jax.device_put(x, target))
    assert stock["none"] == ""
    assert "incompatible devices" in stock["explicit"]


def moved_inside_jit(types: Any, scoped: str) -> None:
    mesh = make_mesh(types)
    targets = [spec for spec in (*LAYOUTS, *SPELLINGS) if _expressible(mesh, spec)]
    like = {str(spec): NamedSharding(mesh, spec) for spec in targets}
    with scope(scoped):
        x = {name: orbax_ext.shard(HOST, NamedSharding(mesh, P(None, "c"))) for name in like}
        matched = jax.jit(lambda tree: orbax_ext.match_sharding(tree, like))(x)
    for name in like:
        assert matched[name].sharding.is_equivalent_to(like[name], 2), name
        assert_holds(matched[name], HOST)


def _expressible(mesh: Mesh, spec: Any) -> bool:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    runs = [[types[axis] is EXPLICIT for axis in entry] for entry in spec if isinstance(entry, tuple)]
    return all(run == sorted(run, reverse=True) for run in runs)


def free_inside_jit() -> None:
    mesh = make_mesh((EXPLICIT,) * 3)
    x = orbax_ext.shard(HOST, NamedSharding(mesh, P("b", None)))
    for target in SPELLINGS:
        like = NamedSharding(mesh, target)

        def step(x: jax.Array, like: Any = like, target: Any = target) -> jax.Array:
            return jax.lax.with_sharding_constraint(orbax_ext.match_sharding(x, like) * 2, target)

        with jax.set_mesh(mesh):
            program = jax.jit(step).lower(x).compile()
            assert not COLLECTIVE.search(program.as_text()), target
            assert_holds(program(x), HOST * 2)
            gathered = jax.jit(lambda x: orbax_ext.match_sharding(x, NamedSharding(mesh, P()))).lower(x).compile()
            assert COLLECTIVE.search(gathered.as_text())  # the search does find programs that move data


def like_a_traced_array() -> None:
    """Inside jit `like` may be an argument too: its type shows the sharding over explicit axes."""
    for types in TYPES.values():
        mesh = make_mesh(types)
        x = orbax_ext.shard(HOST, NamedSharding(mesh, P("c")))
        like = orbax_ext.shard(HOST, NamedSharding(mesh, P(None, "b")))
        with jax.set_mesh(mesh):
            matched = jax.jit(lambda x, like: orbax_ext.match_sharding({"x": x, "n": 3}, {"x": like, "n": None}))(
                x, like
            )
        assert matched["n"] == 3
        assert_holds(matched["x"], HOST)
        if types == (EXPLICIT,) * 3:
            assert matched["x"].sharding.is_equivalent_to(like.sharding, 2)


def like_an_abstract_tree() -> None:
    """`jax.eval_shape` returns shardings over explicit axes on a mesh without devices."""
    mesh = make_mesh((EXPLICIT,) * 3)
    x = orbax_ext.shard(HOST, NamedSharding(mesh, P("b")))
    with jax.set_mesh(mesh):
        like = jax.eval_shape(lambda x: jax.sharding.reshard(x, P("c", "b")), x)
        assert not isinstance(like.sharding.mesh, Mesh)
        placed = orbax_ext.match_sharding(HOST, like)
    for matched in (placed, orbax_ext.match_sharding(x, like)):
        assert matched.sharding == NamedSharding(mesh, P("c", "b"))
        assert_holds(matched, HOST)
    error = error_of(lambda: orbax_ext.match_sharding({"w": HOST}, {"w": like}))
    assert "leaf w: expected a sharding on a mesh of devices" in error


def to_host_memory_inside_jit() -> None:
    for types in TYPES.values():
        mesh = make_mesh(types)
        x = orbax_ext.shard(HOST, NamedSharding(mesh, P("b")))
        target = NamedSharding(mesh, P("c"), memory_kind="pinned_host")
        with jax.set_mesh(mesh):
            matched = jax.jit(lambda x, target=target: orbax_ext.match_sharding(x * 1, target))(x)
        assert matched.sharding.memory_kind == "pinned_host"
        assert matched.sharding.is_equivalent_to(target, 2)
        assert_holds(matched, HOST)


def constants_and_keys_inside_jit() -> None:
    mesh = make_mesh((EXPLICIT,) * 3)
    keys = orbax_ext.shard(some_keys(), NamedSharding(mesh, P("b")))
    target = NamedSharding(mesh, P("c"))
    with jax.set_mesh(mesh):
        matched, moved = jax.jit(lambda keys: orbax_ext.match_sharding((HOST, keys), target))(keys)
    assert matched.sharding.is_equivalent_to(target, 2)
    assert_holds(matched, HOST)
    assert moved.sharding.is_equivalent_to(target, 1)


def to_and_from_one_process() -> None:
    """Moves a local copy to a global sharding and back, which device_put does not do."""
    mesh = make_mesh()
    everywhere = NamedSharding(mesh, P())
    here = SingleDeviceSharding(jax.local_devices()[0])
    local = jax.device_put(HOST, jax.local_devices()[-1])
    for _ in each_scope():
        spread = orbax_ext.match_sharding({"x": local, "host": HOST, "name": "n"}, everywhere)
        assert_holds(spread["x"], HOST)
        assert_holds(spread["host"], HOST)
        assert spread["name"] == "n"
        assert_holds(orbax_ext.match_sharding(spread["x"], here), HOST)
    for spec in (P(), P("b")):
        pinned = orbax_ext.match_sharding(spread["x"], NamedSharding(mesh, spec, memory_kind="pinned_host"))
        assert pinned.sharding == NamedSharding(mesh, spec, memory_kind="pinned_host")
        assert_holds(pinned, HOST)
        assert_holds(orbax_ext.match_sharding(pinned, spread["x"]), HOST)
    if jax.process_count() > 1:
        cut = orbax_ext.shard(HOST, NamedSharding(mesh, P("b")))
        error = error_of(lambda: orbax_ext.match_sharding({"w": cut}, here))
        assert "match_sharding: leaf w is spread over several processes" in error


def impossible() -> dict[str, str]:
    mesh = make_mesh((AUTO, EXPLICIT, AUTO))
    x = orbax_ext.shard(HOST, NamedSharding(mesh, P()))
    bad = NamedSharding(mesh, P(("c", "b")))
    outside = orbax_ext.match_sharding(x, bad)
    assert outside.sharding == bad
    return {
        "inside jit": error_of(lambda: jax.jit(lambda x: orbax_ext.match_sharding({"w": x}, bad))(x)),
        "shape": error_of(lambda: orbax_ext.match_sharding({"w": x[:3]}, NamedSharding(mesh, P("b")))),
        "spec": error_of(lambda: orbax_ext.canonical_spec(P("b"))),
    }


def explicit_state(mesh: Mesh) -> dict[str, jax.Array]:
    """Returns state whose spec does not name the axis of size 1, as another program may have saved it."""
    return {
        "w": orbax_ext.shard(HOST, NamedSharding(mesh, P("b", "c"))),
        "b": orbax_ext.shard(HOST[0], NamedSharding(mesh, P("c"))),
    }


def asserting_step(state: dict[str, Any]) -> dict[str, Any]:
    """A training step with explicit axes: with_sharding_constraint compares shardings and moves nothing."""
    state = {
        "w": jax.lax.with_sharding_constraint(state["w"], P(("a", "b"), "c")),
        "b": jax.lax.with_sharding_constraint(state["b"], P("c")),
    }
    return {"w": state["w"] * 2 + state["b"], "b": state["b"]}


def asserted_step() -> str:
    mesh = make_mesh((EXPLICIT,) * 3)
    state = explicit_state(mesh)
    like = {"w": NamedSharding(mesh, P(("a", "b"), "c")), "b": NamedSharding(mesh, P("c"))}
    with jax.set_mesh(mesh):
        stock = error_of(lambda: jax.jit(asserting_step)(state))
        stepped = jax.jit(asserting_step)(orbax_ext.match_sharding(state, like))
    assert_holds(stepped["w"], HOST * 2 + HOST[0])
    return stock


def restored_then_stepped(directory: str, registered: bool) -> None:
    mesh = make_mesh((EXPLICIT,) * 3)
    state = explicit_state(mesh)
    target = {"w": NamedSharding(mesh, P(("a", "b"), "c")), "b": NamedSharding(mesh, P("c"))}
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, target)
    path = pathlib.Path(directory) / ("ours" if registered else "stock")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        args = orbax_ext.restore_args(abstract)
        with jax.set_mesh(mesh):
            if registered:
                with orbax_ext.registered(replica_axis="b"):
                    restored = checkpointer.restore(path, item=abstract, restore_args=args)
            else:
                restored = checkpointer.restore(path, item=abstract, restore_args=args)
            assert {name: array.sharding for name, array in restored.items()} == target
            stepped = jax.jit(asserting_step)(restored)
    assert_holds(stepped["w"], HOST * 2 + HOST[0])


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_a_change_of_spelling_moves_nothing(cluster: lab.Cluster, types: Any) -> None:
    cluster.run(spelled_differently, types)


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_data_moves_to_the_exact_sharding_outside_jit(cluster: lab.Cluster, types: Any) -> None:
    cluster.run(moved_outside_jit, types)


@pytest.mark.parametrize("types", TYPES)
def test_data_moves_to_the_exact_sharding_inside_jit(cluster: lab.Cluster, types: str) -> None:
    for scoped in ("none", types) if types == "mixed" else (types,):
        cluster.run(moved_inside_jit, TYPES[types], scoped)


@pytest.mark.parametrize(
    "scenario",
    [
        other_mesh_same_place,
        moved_under_any_scope,
        free_inside_jit,
        like_a_traced_array,
        like_an_abstract_tree,
        constants_and_keys_inside_jit,
        to_and_from_one_process,
    ],
    ids=lambda scenario: scenario.__name__.replace("_", "-"),
)
def test_a_scenario_matches_shardings(cluster: lab.Cluster, scenario: Any) -> None:
    cluster.run(scenario)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX 0.9.0 can't compile this for CPU devices")
def test_memory_kinds_are_matched_inside_jit(cluster: lab.Cluster) -> None:
    cluster.run(to_host_memory_inside_jit)


def test_an_axis_of_size_1_breaks_an_explicit_step_until_the_spelling_is_matched(cluster: lab.Cluster) -> None:
    """Stock: with_sharding_constraint compares spellings on JAX 0.9.0, 0.10.2 and 0.12.0.1."""
    for stock in cluster.run(asserted_step):
        assert "acts as an assert when all axes of mesh are of type `Explicit`" in stock


@pytest.mark.parametrize("registered", [False, True], ids=["plain-orbax", "orbax_ext"])
def test_restored_state_fits_a_step_that_asserts_shardings(
    cluster: lab.Cluster, tmp_path: pathlib.Path, registered: bool
) -> None:
    cluster.run(restored_then_stepped, str(tmp_path), registered)


def test_an_impossible_match_is_explained(cluster: lab.Cluster) -> None:
    for rank, errors in enumerate(cluster.run(impossible)):
        assert "match_sharding: leaf w: the spec" in errors["inside jit"]
        assert "auto axis before an explicit one" in errors["inside jit"]
        assert f"match_sharding: leaf w on process {rank}: expected a shape" in errors["shape"]
        assert "expected a NamedSharding, found P" in errors["spec"]
