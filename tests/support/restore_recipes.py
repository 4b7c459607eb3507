"""Recipes of whole restores as plain data: a tree, the format plain Orbax saves it in, and the restore to compare."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from orbax_ext.plan import planner
from tests.support import plain_orbax, states

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MeshRecipe:
    """A mesh over all devices of the job."""

    sizes: tuple[int, ...]
    names: Axes
    explicit: Axes = ()  # names of the explicit axes; the others are auto
    backwards: bool = False  # devices in the opposite order, so that the last process has the first replica

    def make(self) -> Mesh:
        devices = np.array(jax.devices()[:: -1 if self.backwards else 1]).reshape(self.sizes)
        types = tuple(AxisType.Explicit if name in self.explicit else AxisType.Auto for name in self.names)
        return Mesh(devices, self.names, axis_types=types)


@dataclasses.dataclass(frozen=True)
class LeafRecipe:
    """A leaf as it is saved and as it is requested. Specs have a tuple of mesh axes for each dimension."""

    shape: tuple[int, ...]
    dtype: str
    saved: tuple[Axes, ...]
    wanted: tuple[Axes, ...]
    wanted_shape: tuple[int, ...]
    wanted_dtype: str
    short: bool = False  # omit unsharded dimensions at the end of the requested spec
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything a restore depends on. Its repr can be pasted: `check(path, Recipe(...))`."""

    saved_mesh: MeshRecipe
    wanted_mesh: MeshRecipe
    leaves: tuple[LeafRecipe, ...]
    knobs: dict[str, Any]
    ocdbt: bool = True
    zarr3: bool = False
    chunk_bytes: int | None = None
    replica_parallel: bool = True
    set_mesh: bool = False
    large_from: int | None = None  # bytes from which the planner treats a leaf as large; None: the planner's own limits


def check(path: str, recipe: Recipe) -> plain_orbax.Comparison:
    """Saves with plain Orbax, restores with plain Orbax and with orbax_ext, and compares. Run on all processes."""
    _save(path, recipe)
    mesh = recipe.wanted_mesh.make()
    restore_args = {f"leaf{index}": _restore_args(leaf, mesh) for index, leaf in enumerate(recipe.leaves)}

    def restore() -> Any:
        with ocp.Checkpointer(_handler(recipe, None)) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))

    with _limits(recipe.large_from), jax.set_mesh(mesh) if recipe.set_mesh else contextlib.nullcontext():
        return plain_orbax.compare(restore, recipe.knobs)


@contextlib.contextmanager
def _limits(large_from: int | None) -> Iterator[None]:
    """Has the planner treat small leaves as large ones, because really large ones take too long to test."""
    before = planner._SMALL, planner._LARGE
    if large_from is not None:
        planner._SMALL = planner._LARGE = large_from
    try:
        yield
    finally:
        planner._SMALL, planner._LARGE = before


def _save(path: str, recipe: Recipe) -> None:
    mesh = recipe.saved_mesh.make()
    state = {}
    for index, leaf in enumerate(recipe.leaves):
        data = states.random_array(index, states.Spec(leaf.shape, leaf.dtype))
        sharding = NamedSharding(mesh, PartitionSpec(*leaf.saved))
        state[f"leaf{index}"] = jax.make_array_from_callback(leaf.shape, sharding, lambda at, data=data: data[at])
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=recipe.chunk_bytes), state)
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=recipe.replica_parallel, array_metadata_store=None)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    if jax.process_index() == 0:
        shutil.rmtree(path, ignore_errors=True)
    with ocp.Checkpointer(_handler(recipe, registry)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state, save_args=save_args))


def _handler(recipe: Recipe, registry: Any) -> ocp.PyTreeCheckpointHandler:
    registries = {} if registry is None else {"type_handler_registry": registry}
    return ocp.PyTreeCheckpointHandler(use_ocdbt=recipe.ocdbt, use_zarr3=recipe.zarr3, **registries)


def _restore_args(leaf: LeafRecipe, mesh: Mesh) -> ocp.ArrayRestoreArgs:
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in leaf.wanted]
    while leaf.short and entries and entries[-1] is None:
        entries.pop()
    kind = {"memory_kind": leaf.memory_kind} if leaf.memory_kind else {}
    return ocp.ArrayRestoreArgs(
        sharding=NamedSharding(mesh, PartitionSpec(*entries), **kind),
        global_shape=leaf.wanted_shape,
        dtype=jnp.dtype(leaf.wanted_dtype),
        strict=leaf.wanted_shape == leaf.shape,
    )
