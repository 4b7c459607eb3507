"""A state saved on 4x8 with each API and format, and restored elsewhere without a description. Run on the processes."""

from __future__ import annotations

import collections
import unittest.mock
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import orbax_ext
from orbax_ext.storage import checkpoint, s3
from orbax_ext.transfer.executor import Executor
from tests.support import plain_orbax, states
from tests.support.checkpoints import FORMATS
from tests.support.states import MeshSpec, P, Spec

SAVED_ON = MeshSpec((2, 2, 8), ("pp", "dp", "tp"))
ARRAYS = {  # as saved
    "weights": Spec((32, 16), "bfloat16", P("tp")),
    "across": Spec((16, 32), "float32", P(None, "tp")),
    "stages": Spec((4, 32), "float32", P("pp", "tp")),
    "experts": Spec((32, 8), "int8", P(("pp", "tp"))),
    "uneven": Spec((6, 5), "float32", P("dp")),
    "whole": Spec((7, 3), "float16"),
    "mask": Spec((32,), "bool", P("tp")),
    "step": Spec((), "int32"),
}
ELSEWHERE = ("dp", "tp")  # the axes of the other meshes: no pp, and dp=4 does not divide `uneven`
MAPPED = {  # on a mesh with dp=4
    "stages": P(None, "tp"),
    "experts": P("tp"),
    "uneven": P(),
}
APIS = ("v0", "v1")

Moments = collections.namedtuple("Moments", ["mu", "nu"])  # noqa: PYI024  as in many optimizers


def others() -> dict[str, Any]:
    """Returns the leaves that are not arrays on devices, in containers of every kind."""
    return {
        "numpy": np.arange(12, dtype=np.int16).reshape(3, 4),
        "count": 7,
        "rate": 0.1,
        "flag": True,
        "text": "héllo",
        "nothing": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "list": [1, {"deep": 2}],
        "tuple": (3, None),
        "moments": Moments(4, 5.5),
    }


def others_restored() -> dict[str, Any]:
    """Returns the same as Orbax restores it: its metadata has tuples as lists, and named tuples as dicts."""
    return {**others(), "tuple": [3, None], "moments": {"mu": 4, "nu": 5.5}}


def save(path: str, api: str, form: str, on: MeshSpec = SAVED_ON) -> None:
    mesh = on.make()
    state = {"arrays": states.make_state(ARRAYS, mesh), **others(), "key": _key(mesh)}
    zarr3, ocdbt = FORMATS[form]
    if api == "v0":
        with ocp.CheckpointManager(
            path, item_handlers=ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, use_ocdbt=ocdbt)
        ) as manager:
            manager.save(3, args=ocp.args.PyTreeSave(state))
        return
    options = ocp_v1.options.ArrayOptions
    saving = options.Saving(use_zarr3=zarr3, use_ocdbt=ocdbt)
    with ocp_v1.Context(array_options=options(saving=saving)):
        getattr(ocp_v1, "save", ocp_v1.save_pytree)(path, state)


def save_on_s3(path: str) -> None:
    with s3.enabled_for(path):
        save(path, "v0", "zarr2 in OCDBT", MeshSpec((2, 2, 2), ("pp", "dp", "tp")))


def restore_from_s3(path: str) -> tuple[list[str], bool]:
    """Returns where the result is not what was saved, and whether S3 is still enabled afterwards."""
    return restore(path), s3.s3_enabled()


def _key(mesh: Mesh) -> jax.Array:
    data = np.asarray(jax.random.key_data(jax.random.key(5, impl="rbg")))
    return jax.random.wrap_key_data(jax.device_put(data, NamedSharding(mesh, P())), impl="rbg")


def mesh_here() -> Mesh:
    """Returns a mesh over all devices of the job, with dp=4 if it has enough of them."""
    replicas = min(4, jax.device_count())
    return Mesh(np.array(jax.devices()).reshape(replicas, -1), ELSEWHERE)


def restore(path: str, **knobs: Any) -> list[str]:
    """Restores onto `mesh_here()` and returns where the result is not what was saved."""
    mesh = mesh_here()
    return _differences(orbax_ext.restore(path, mesh, **knobs), mesh)


def restore_on_one_device(path: str) -> list[str]:
    restored = orbax_ext.restore(path)
    data, mine = states.host_data(ARRAYS), SingleDeviceSharding(jax.local_devices()[0])
    arrays = restored["arrays"]
    texts = [f"{name}: bytes" for name in ARRAYS if states.bits(arrays[name]) != states.bits(data[name])]
    texts += [f"{name}: {array.sharding}" for name, array in arrays.items() if array.sharding != mine]
    return texts + _other_differences(restored)


def restore_while_one_fails(path: str) -> str:
    """Restores without a mesh while process 2 can read no arrays; returns its error."""
    read_direct = Executor.read_direct

    async def failing(*given: Any) -> Any:
        if jax.process_index() == 2:
            raise OSError("the disk is gone")
        return await read_direct(*given)

    with unittest.mock.patch.object(Executor, "read_direct", failing):
        try:
            return "; ".join(restore_on_one_device(path))
        except OSError as error:
            return str(error)


def initialize() -> str:
    """Returns the error of `jax.distributed.initialize`, after something else has used JAX."""
    try:
        jax.distributed.initialize("localhost:1", 1, 0)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it did not fail")


def _mapped(name: str, spec: Spec, mesh: Mesh) -> P:
    if name == "uneven" and mesh.shape["dp"] in (1, 2):
        return spec.spec
    return MAPPED.get(name, spec.spec)


def _differences(restored: dict[str, Any], mesh: Mesh) -> list[str]:
    specs = {name: Spec(spec.shape, spec.dtype, _mapped(name, spec, mesh)) for name, spec in ARRAYS.items()}
    return states.differences(restored["arrays"], specs, mesh) + _other_differences(restored)


def _other_differences(restored: dict[str, Any]) -> list[str]:
    """Returns where anything but the arrays is not as Orbax restores it."""
    rest = {name: value for name, value in restored.items() if name not in ("arrays", "key")}
    texts = plain_orbax.differences(rest, others_restored())
    key = restored["key"]
    expected = np.asarray(jax.random.key_data(jax.random.key(5, impl="rbg")))
    data = jax.random.key_data(key).addressable_shards[0].data
    if "rbg" not in str(key.dtype) or states.bits(data) != states.bits(expected):
        texts.append(f"key: {key}")
    return texts


def restore_with_plain_orbax(path: str, api: str) -> str:
    """Returns the error of plain Orbax without a description, which makes the shardings that were saved."""
    try:
        if api == "v0":
            with ocp.CheckpointManager(path, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
                manager.restore(3)
        else:
            getattr(ocp_v1, "load", ocp_v1.load_pytree)(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def restore_into_abstract(path: str, api: str) -> list[str]:
    """Restores with plain Orbax into the abstract tree; returns where the result is not what was saved."""
    mesh = mesh_here()
    abstract = orbax_ext.abstract(path, mesh)
    if api == "v0":
        args = ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
        with ocp.CheckpointManager(path, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
            return _differences(manager.restore(3, args=args), mesh)
    try:
        return _differences(getattr(ocp_v1, "load", ocp_v1.load_pytree)(path, abstract), mesh)
    except ValueError as error:
        return [str(error)]


def count_reads(path: str) -> tuple[int, list[str]]:
    """Returns how often this process read metadata for `abstract`, and the lines of its log about the mapping."""
    reading = unittest.mock.patch.object(checkpoint, "read_tree", wraps=checkpoint.read_tree)
    with reading as read_tree, states.logged() as lines:
        orbax_ext.abstract(path, mesh_here())
    return read_tree.call_count, [line for line in lines if " on mesh " in line]


def refuse(path: str, **arguments: Any) -> tuple[str, list[str]]:
    """Returns the error of `abstract` and the types that it can be caught as."""
    try:
        orbax_ext.abstract(path, mesh_here(), **arguments)
    except Exception as error:
        return str(error), [kind.__name__ for kind in type(error).__mro__]
    raise AssertionError("abstract did not fail")


def refuse_different_paths(path: str) -> tuple[str, list[str]]:
    return refuse(f"{path}/{jax.process_index() % 2}")


def refuse_different(path: str, specs: list[Any], dtypes: list[Any]) -> tuple[str, list[str]]:
    """Gives process 1 the second of two specs and dtypes, all others the first."""
    second = int(jax.process_index() == 1)
    return refuse(path, specs=specs[second], dtype=dtypes[second])


def refuse_without(path: str, absent: int) -> tuple[str, list[str]] | None:
    """Restores on all processes but one."""
    if jax.process_index() == absent:
        return None
    try:
        orbax_ext.restore(path, mesh_here(), stall_timeout=5.0)
    except Exception as error:
        return str(error), [kind.__name__ for kind in type(error).__mro__]
    raise AssertionError("restore did not fail")
