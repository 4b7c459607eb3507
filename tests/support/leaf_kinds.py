"""Every kind of leaf that users have, by name: the saved tree and the request. Run on 4 processes x 2 devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import orbax_ext
from orbax_ext.upstream.array_handler import ShardingMetadata
from tests.support import fault_injection, plain_orbax, states
from tests.support.states import MeshSpec, P, Spec


@dataclasses.dataclass(frozen=True)
class Case:
    """A tree to save, and the request to restore it: arrays, abstract arrays or restore args for its leaves."""

    saved: Any
    wanted: Any = None  # None: a restore without any description


CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def mesh(sizes: tuple[int, ...] = (4, 2), names: tuple[str, ...] = ("dp", "tp"), types: tuple[str, ...] = ()) -> Mesh:
    return MeshSpec(sizes, names, types).make()


def arrays(where: Mesh, **specs: Spec) -> dict[str, jax.Array]:
    return states.make_state(specs, where)


def like(tree: Any, **changes: Any) -> Any:
    """Returns the abstract tree with some leaves changed."""
    return {**jax.tree.map(ocp.utils.to_shape_dtype_struct, tree), **changes}


def abstract(shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


@case
def replicated_over_one_axis_over_several_and_over_none() -> Case:
    state = arrays(
        mesh((2, 2, 2), ("pp", "dp", "tp")),
        one=Spec((4, 16), "float32", P("pp", "tp")),
        several=Spec((16, 4), "bfloat16", P("tp")),
        all=Spec((6, 2), "float32"),
        none=Spec((4, 16), "float32", P(("pp", "dp"), "tp")),
        only_dp=Spec((4,), "int16", P("dp")),
    )
    return Case(state, like(state))


@case
def fully_sharded() -> Case:
    state = arrays(mesh(), a=Spec((32, 3), "float32", P(("dp", "tp"))), b=Spec((4, 16), "bfloat16", P("dp", "tp")))
    return Case(state, like(state))


@case
def different_meshes_in_one_tree() -> Case:
    state = {
        "square": arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32")),
        "flat": arrays(mesh((8,), ("x",)), w=Spec((32,), "bfloat16", P("x")), b=Spec((5, 5), "int8")),
        "turned": arrays(mesh((2, 4), ("tp", "dp")), w=Spec((16, 4), "float32", P("tp"))),
    }
    return Case(state, like(state))


@case
def one_dimensional_mesh() -> Case:
    state = arrays(mesh((8,), ("data",)), w=Spec((8, 4), "float32"), b=Spec((3,), "bool"), s=Spec((), "int32"))
    return Case(state, like(state))


@case
def short_and_unconstrained_specs() -> Case:
    state = arrays(mesh(), short=Spec((8, 4, 2), "float32", P("tp")), none=Spec((8, 4), "float32", P(None, None)))
    loose = NamedSharding(mesh(), P(P.UNCONSTRAINED, "tp"))
    return Case(
        {**state, **arrays(mesh(), loose=Spec((4, 8), "float32"))},
        like(state, loose=abstract((4, 8), "float32", loose)),
    )


@case
def axes_of_size_one_in_the_spec() -> Case:
    state = arrays(
        mesh((1, 4, 2), ("pp", "dp", "tp")),
        a=Spec((2, 16), "float32", P("pp", "tp")),
        b=Spec((16, 2), "float32", P(("pp", "tp"), None)),
        c=Spec((16,), "float32", P(("tp", "pp"))),
    )
    return Case(state, like(state))


@case
def explicit_auto_and_mixed_axes() -> Case:
    kinds = {"explicit": ("explicit", "explicit"), "auto": ("auto", "auto"), "mixed": ("auto", "explicit")}
    state = {
        name: arrays(mesh(types=types), w=Spec((16, 4), "float32", P("tp", None)), b=Spec((3,), "float32"))
        for name, types in kinds.items()
    }
    return Case(state, like(state))


@case
def single_device_shardings() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    mine = SingleDeviceSharding(jax.local_devices()[-1])
    return Case(state, like(state, b=abstract((3,), "float32", mine)))


@case
def numpy_python_scalars_and_strings() -> Case:
    state = {
        **arrays(mesh(), w=Spec((16, 4), "float32", P("tp"))),
        "numpy": np.arange(12, dtype=np.int16).reshape(3, 4),
        "numpy scalar": np.array(2.5, np.float32),
        "int": 7,
        "float": 0.1,
        "text": "héllo",
    }
    return Case(state, {**state, **like(arrays(mesh(), w=Spec((16, 4), "float32", P("tp"))))})


@case
def none_and_empty_nodes() -> Case:
    state: dict[str, Any] = {
        "w": arrays(mesh(), w=Spec((16, 4), "float32", P("tp")))["w"],
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "deep": {"empty": {}, "none": [None, {}]},
    }
    return Case(state, jax.tree.map(ocp.utils.to_shape_dtype_struct, state))


def _keys(impl: str) -> Case:
    everywhere = NamedSharding(mesh(), P())
    state: dict[str, Any] = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")))
    for name, shape in {"key": (), "keys": (3,)}.items():
        data = jax.random.key_data(jax.random.split(jax.random.key(5, impl=impl), shape))
        state[name] = jax.random.wrap_key_data(jax.device_put(np.asarray(data), everywhere), impl=impl)
    return Case(state, state)


for _impl in ("threefry2x32", "rbg", "unsafe_rbg"):
    CASES[f"typed_keys_{_impl}"] = functools.partial(_keys, _impl)


@case
def memory_kinds() -> Case:
    state = arrays(
        mesh(), a=Spec((16, 8), "float32", P("tp")), b=Spec((16, 8), "bfloat16"), c=Spec((16, 8), "int8", P("tp"))
    )
    wanted = {
        name: abstract(array.shape, array.dtype, array.sharding.with_memory_kind(kind))
        for (name, array), kind in zip(state.items(), ["pinned_host", "unpinned_host", "device"], strict=True)
    }
    return Case(state, wanted)


@case
def memory_layouts() -> Case:
    state = arrays(mesh(), a=Spec((16, 8), "float32", P("tp")), b=Spec((16, 8), "float32", P("tp")))
    turned = Format(Layout(major_to_minor=(1, 0)), state["a"].sharding)
    return Case(
        state, {**like(state), "a": ocp.ArrayRestoreArgs(sharding=turned, global_shape=(16, 8), dtype=jnp.float32)}
    )


@case
def casts() -> Case:
    pairs = [
        ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("int32", "int8"), ("int8", "int32"),
        ("uint8", "float32"), ("bool", "int32"), ("float32", "float8_e4m3fn"),
    ]  # fmt: skip
    state = arrays(mesh(), **{f"{old}_to_{new}": Spec((16, 4), old, P("tp")) for old, new in pairs})
    # Only 0 and 1: the result of casting NaN or values out of range is not defined.
    state = {
        name: jax.make_array_from_callback(
            array.shape, array.sharding, lambda i, t=array.dtype: (np.arange(64).reshape(16, 4) % 2).astype(t)[i]
        )
        for name, array in state.items()
    }
    wanted = {f"{old}_to_{new}": abstract((16, 4), new, state[f"{old}_to_{new}"].sharding) for old, new in pairs}
    return Case(state, wanted)


@case
def padding_and_truncation() -> Case:
    state = arrays(
        mesh(), pad=Spec((8, 4), "float32", P("tp")), cut=Spec((16, 4), "bfloat16", P("tp")), same=Spec((8,), "int8")
    )
    wanted = {
        name: ocp.ArrayRestoreArgs(
            sharding=state[name].sharding, global_shape=shape, dtype=state[name].dtype, strict=False
        )
        for name, shape in {"pad": (24, 6), "cut": (8, 2), "same": (8,)}.items()
    }
    return Case(state, wanted)


@case
def sharding_metadata() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    wanted = {
        name: ocp.ArrayRestoreArgs(sharding=ShardingMetadata.from_jax_sharding(array.sharding))
        for name, array in state.items()
    }
    return Case(state, wanted)


@case
def mesh_and_mesh_axes() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    wanted = {name: ocp.ArrayRestoreArgs(mesh=mesh(), mesh_axes=array.sharding.spec) for name, array in state.items()}
    return Case(state, wanted)


@case
def no_description_of_the_leaves() -> Case:
    return Case(arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "bfloat16"), s=Spec((), "int32")))


@case
def as_numpy() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    return Case(state, {**like(state), "b": ocp.RestoreArgs(restore_type=np.ndarray)})


# Requests that plain Orbax refuses.


@case
def refused_another_shape() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    return Case(state, like(state, w=abstract((24, 4), "float32", state["w"].sharding)))


@case
def refused_another_rank() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    return Case(state, like(state, w=abstract((16, 4, 1), "float32", state["w"].sharding)))


@case
def refused_a_leaf_that_was_not_saved() -> Case:
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), b=Spec((3,), "float32"))
    return Case(state, like(state, other=abstract((3,), "float32", state["b"].sharding)))


@case
def refused_a_shape_that_does_not_divide() -> Case:
    state = arrays(mesh(), w=Spec((13, 4), "float32"), b=Spec((3,), "float32"))
    return Case(state, like(state, w=abstract((13, 4), "float32", NamedSharding(mesh(), P("tp")))))


@case
def refused_a_spec_of_too_many_dimensions() -> Case:
    state = arrays(mesh(), w=Spec((16,), "float32"), b=Spec((3,), "float32"))
    wanted = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh(), P(None, "tp")), global_shape=(16,), dtype=jnp.float32)
    return Case(state, {**like(state), "w": wanted})


# Run on the processes.


def restore_to_some_processes(path: str, knobs: dict[str, Any]) -> tuple[str, bool]:
    """Restores a leaf to a mesh of which only the first two processes have devices."""
    state = arrays(mesh(), w=Spec((16, 4), "float32", P("tp")), some=Spec((16, 4), "float32", P("tp")))
    half = Mesh(np.array(jax.devices()[: jax.device_count() // 2]).reshape(2, -1), ("dp", "tp"))
    wanted = like(state, some=abstract((16, 4), "float32", NamedSharding(half, P("tp"))))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))
        with orbax_ext.registered(**knobs):
            try:
                checkpointer.restore(path, args=_args(wanted))
            except orbax_ext.RestoreFailedError as error:
                return str(error), isinstance(error, ValueError)
    raise AssertionError("the restore did not fail")


def compare(path: str, name: str, all_knobs: list[dict[str, Any]]) -> list[plain_orbax.Comparison]:
    """Saves a case's tree with plain Orbax, and compares orbax_ext, with each set of knobs, and plain Orbax."""
    built = _save(path, name)

    def restore() -> Any:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=_args(built.wanted))

    return plain_orbax.compare_each(restore, all_knobs)


def _save(path: str, name: str) -> Case:
    built = CASES[name]()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(built.saved))
    return built


def _args(wanted: Any) -> Any:
    if wanted is None:
        return ocp.args.PyTreeRestore()

    def is_args(node: Any) -> bool:
        return isinstance(node, ocp.RestoreArgs)

    restore_args = jax.tree.map(
        lambda leaf: leaf if is_args(leaf) else ocp.checkpoint_utils.construct_restore_args(leaf),
        wanted,
        is_leaf=is_args,
    )
    item = jax.tree.map(lambda leaf: 0 if is_args(leaf) else leaf, wanted, is_leaf=is_args)
    return ocp.args.PyTreeRestore(item, restore_args=restore_args)


def restore_with_a_bad_disk(path: str, name: str, rank: int) -> tuple[str, list[str]]:
    """Restores a case while one process can't read; returns the error's text and the types it can be caught as."""
    built = _save(path, name)
    bad_disk = fault_injection.on(rank, lambda: fault_injection.read_error(FileNotFoundError("no such chunk")))
    with bad_disk, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            with orbax_ext.registered(strategy="single", stall_timeout=60, strict_readers=True):
                checkpointer.restore(path, args=_args(built.wanted))
        except Exception as error:
            return str(error), [kind.__name__ for kind in type(error).__mro__]
    raise AssertionError("the restore did not fail")
