"""Every restore that plain Orbax can do, orbax_ext does too, with the same bits.

Hypothesis draws whole restores. `make test` tries 25 examples, the same every time; `make test-property` tries as many
new ones as ORBAX_EXT_EXAMPLES says. A failure shrinks to a `Recipe(...)` to paste into `restore_recipes.check`.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
import typing

import hypothesis
import pytest
from hypothesis import strategies as st

from orbax_ext import lab, options
from tests.support import plain_orbax, restore_recipes, states
from tests.support.restore_recipes import LeafRecipe, MeshRecipe, Recipe

EXAMPLES = int(os.environ.get("ORBAX_EXT_EXAMPLES", "0"))
# "direct" is drawn less often: it does the least.
STRATEGIES = [name for name in typing.get_args(options.Strategy) for _ in range(1 if name == "direct" else 4)]
MESH_SIZES = [  # of 8 devices
    (8,),
    (2, 4),
    (4, 2),
    (1, 8),
    (8, 1),
    (2, 2, 2),
    (1, 2, 4),
    (4, 1, 2),
]
DTYPES = [
    "bfloat16", "float32", "float16", "float8_e4m3fn", "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32",
    "complex64", "int4",
]  # fmt: skip
CASTS = {"float32": ["bfloat16", "float16"], "bfloat16": ["float32"], "int8": ["int32"], "bool": ["int32"]}

meshes = st.builds(
    lambda sizes, explicit, backwards: MeshRecipe(
        sizes,
        ("dp", "tp", "pp")[: len(sizes)],
        tuple(sorted(explicit & set(("dp", "tp", "pp")[: len(sizes)]))),
        backwards,
    ),
    st.sampled_from(MESH_SIZES),
    st.sets(st.sampled_from(["dp", "tp", "pp"])),
    st.booleans(),
)


@st.composite
def specs(draw: st.DrawFn, axes: tuple[str, ...], ndim: int) -> tuple[tuple[str, ...], ...]:
    """Draws some of the axes for each dimension; no axis is used twice."""
    dim_of = {axis: draw(st.integers(-1, ndim - 1)) for axis in draw(st.permutations(axes))} if ndim else {}
    return tuple(tuple(axis for axis, its_dim in dim_of.items() if its_dim == dim) for dim in range(ndim))


@st.composite
def leaves(draw: st.DrawFn, saved_mesh: MeshRecipe, wanted_mesh: MeshRecipe, replicated: set[str]) -> LeafRecipe:
    """Draws a leaf; one of eight may be sharded over an axis that the other leaves are replicated over."""
    ndim = draw(st.integers(0, 3))
    usual = tuple(axis for axis in wanted_mesh.names if axis not in replicated)
    axes = wanted_mesh.names if draw(st.integers(0, 7)) == 7 else usual
    saved, wanted = draw(specs(saved_mesh.names, ndim)), draw(specs(axes, ndim))
    steps = [math.lcm(_parts(saved_mesh, a), _parts(wanted_mesh, b)) for a, b in zip(saved, wanted, strict=True)]
    shape = tuple(step * draw(st.integers(1, 3)) for step in steps)
    wanted_shape = shape
    if ndim and draw(st.integers(0, 9)) == 9:  # padding or truncation
        wanted_shape = tuple(step * draw(st.integers(1, 3)) for step in steps)
    dtype = draw(st.sampled_from(DTYPES))
    wanted_dtype = draw(st.sampled_from([dtype, dtype, dtype, *CASTS.get(dtype, [])]))
    kind = draw(st.sampled_from([None, None, "device", "pinned_host", "unpinned_host"]))
    return LeafRecipe(shape, dtype, saved, wanted, wanted_shape, wanted_dtype, draw(st.booleans()), kind)


@st.composite
def knobs(draw: st.DrawFn, mesh: MeshRecipe, replicated: set[str]) -> dict[str, object]:
    drawn: dict[str, object] = {"strategy": draw(st.sampled_from(STRATEGIES))}
    if draw(st.booleans()):
        axes = sorted(replicated) or [draw(st.sampled_from(mesh.names))]
        drawn["replica_axis"] = axes if len(axes) > 1 else axes[0]
        drawn["primary_replica_id"] = draw(st.integers(0, _parts(mesh, tuple(axes)) - 1))
    if draw(st.booleans()):
        drawn["broadcast_memory_limit_bytes"] = draw(st.sampled_from([1, 50, 1000, 1 << 20]))
    return drawn


@st.composite
def all_recipes(draw: st.DrawFn) -> Recipe:
    saved_mesh = draw(meshes)
    wanted_mesh = draw(st.one_of(st.just(saved_mesh), meshes))
    replicated = draw(st.sets(st.sampled_from(wanted_mesh.names)))
    return Recipe(
        saved_mesh,
        wanted_mesh,
        tuple(draw(st.lists(leaves(saved_mesh, wanted_mesh, replicated), min_size=1, max_size=4))),
        draw(knobs(wanted_mesh, replicated)),
        ocdbt=draw(st.booleans()),
        zarr3=draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from([None, None, 16, 100])),
        replica_parallel=draw(st.booleans()),
        set_mesh=draw(st.booleans()),
        large_from=draw(st.sampled_from([None, 0, 1, 32])),
    )


def _parts(mesh: MeshRecipe, axes: tuple[str, ...]) -> int:
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    return math.prod(sizes[axis] for axis in axes)


_numbers = itertools.count()


@pytest.mark.property
@hypothesis.settings(
    max_examples=EXAMPLES or 25,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=False,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(recipe=all_recipes())
def test_any_restore_is_what_plain_orbax_restores(
    small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory, recipe: Recipe
) -> None:
    path = pathlib.Path(tmp_path_factory.getbasetemp()) / f"property{next(_numbers)}"
    comparisons = small_cluster.run(restore_recipes.check, str(path), recipe, timeout=60)
    first = comparisons[0]
    try:
        plain_orbax.assert_same(comparisons)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{first.messages}\nrecipe = {recipe!r}") from None
    plain_error, _ = first.errors
    strategies = sorted(set(states.strategy_names(first.strategy.values()))) or ["direct"]
    result = f"refused by both: {first.messages[0][:60]}" if plain_error else ", ".join(strategies)
    hypothesis.event(f"{recipe.knobs['strategy']}: {result}")
