"""Scenarios for the stock single-replica handler. Run on each of 4 processes x 4 devices."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

LATE = 45.0  # seconds; opening a Gloo communicator times out after 30
_REPLICA_AXIS = 1  # the index of the mesh axis "dp"

Tree = dict[str, Any]


def installed_version() -> str:
    return importlib.metadata.version("orbax-checkpoint")


def patterns() -> dict[str, np.ndarray[Any, Any]]:
    """Returns arrays of many types, with values that a sum over replicas changes."""
    floats = ("float32", "float16", ml_dtypes.bfloat16)
    arrays = {str(np.dtype(dtype)): _random_bits(dtype) for dtype in floats}
    arrays["float8_e4m3fn"] = _random_bits(ml_dtypes.float8_e4m3fn)
    arrays["bool"] = np.arange(512) % 3 == 0
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        arrays[name] = np.random.default_rng(7).integers(-128, 127, 512).astype(name)
    arrays["int4"] = (np.arange(512) % 16 - 8).astype(ml_dtypes.int4)
    arrays["complex64"] = _random_bits("float32")[:512].view(np.complex64).repeat(2)
    return {name: values.reshape(-1, 32) for name, values in arrays.items()}


def _random_bits(dtype: Any) -> np.ndarray[Any, Any]:
    """Returns 512 numbers of random bits, with denormals, both zeros, quiet and signalling NaNs with payloads."""
    width = np.dtype(dtype).itemsize
    bits = np.random.default_rng(11).integers(0, 256**width, 512, dtype=np.uint64).astype(f"uint{8 * width}")
    top = np.array(1 << (8 * width - 1), bits.dtype)
    bits[:4] = [0, top, 1, top + 1]
    if np.dtype(dtype) == np.float32:
        bits[4:8] = [0x7F800001, 0xFF801234, 0x7FC00000, 0x007FFFFF]
    return bits.view(dtype)


def mesh(replicas: int = 4) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(1, replicas, -1), ("pp", "dp", "tp"))


def save(path: str, values: Tree, *, use_ocdbt: bool = True) -> None:
    """Saves with the default handler of arrays."""
    placed = {name: place(value, mesh()) for name, value in values.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(placed))


def sharding(onto: Mesh) -> NamedSharding:
    return NamedSharding(onto, PartitionSpec(None, "tp"))


def place(value: np.ndarray[Any, Any], onto: Mesh) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding(onto), lambda index: value[index])


@contextlib.contextmanager
def single_replica_handler() -> Iterator[None]:
    """Registers the stock handler as its documentation says."""
    before = type_handlers.get_type_handler(jax.Array)
    handler = type_handlers.SingleReplicaArrayHandler(replica_axis_index=_REPLICA_AXIS, primary_replica_id=0)
    type_handlers.register_type_handler(jax.Array, handler, override=True)
    try:
        yield
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)


def restore(path: str, like: Tree, onto: Mesh) -> Tree:
    args = {
        name: type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=sharding(onto), global_shape=value.shape, dtype=value.dtype
        )
        for name, value in like.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored: Tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(dict(like), restore_args=args))
    return restored


def differences(restored: Tree, wanted: Tree) -> dict[str, str]:
    """Returns the leaves whose type or bytes on this process's devices differ from `wanted`."""
    texts = {}
    for name, value in wanted.items():
        array = restored[name]
        if array.dtype != value.dtype:
            texts[name] = f"{value.dtype} came back as {array.dtype}"
        elif any(
            np.asarray(shard.data).tobytes() != value[shard.index].tobytes() for shard in array.addressable_shards
        ):
            texts[name] = "other bytes"
    return texts


def small() -> Tree:
    return {"w": np.arange(1, 257, dtype=np.float32).reshape(8, 32)}


def restore_under_set_mesh(path: str) -> dict[str, str]:
    with single_replica_handler(), jax.set_mesh(mesh()):
        return differences(restore(path, small(), mesh()), small())


def restore_many_types(path: str, names: tuple[str, ...]) -> dict[str, str]:
    wanted = {name: value for name, value in patterns().items() if name in names}
    with single_replica_handler():
        return differences(restore(path, wanted, mesh()), wanted)


def restore_with_late_reader(path: str) -> dict[str, str]:
    """Restores while the primary reads late. The two processes of each broadcast have no communicator yet."""
    with single_replica_handler(), _slow_reads():
        return differences(restore(path, small(), mesh(replicas=2)), small())


@contextlib.contextmanager
def _slow_reads() -> Iterator[None]:
    module: Any = importlib.import_module("orbax.checkpoint._src.serialization.jax_array_handlers")
    read = module._deserialize_arrays

    async def late(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(LATE)
        return await read(*args, **kwargs)

    module._deserialize_arrays = late
    try:
        yield
    finally:
        module._deserialize_arrays = read


def damage(path: str) -> None:
    """Truncates the chunks of one leaf, and keeps its metadata."""
    chunks = [file for file in pathlib.Path(path, "w").iterdir() if not file.name.startswith(".")]
    for chunk in chunks:
        chunk.write_bytes(chunk.read_bytes()[:10])


def restore_damaged(path: str) -> dict[str, str]:
    with single_replica_handler():
        return differences(restore(path, small(), mesh()), small())


def save_after_restore(path: str) -> dict[str, str]:
    """Registers the handler after the checkpointer is made, restores and saves, as training programs do."""
    again = f"{path}.again"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, single_replica_handler():
        restored = restore(path, small(), mesh())
        checkpointer.save(again, args=ocp.args.PyTreeSave(restored), force=True)
        return differences(restore(again, small(), mesh()), small())


def restore_without_process_3(path: str) -> str:
    """Has all processes but 3 enter the meeting before the broadcast."""
    os.environ["ORBAX_PRE_BROADCAST_TIMEOUT_SECS"] = "3"
    if jax.process_index() == 3:
        return "stayed away"
    module = importlib.import_module("orbax.checkpoint._src.serialization.jax_array_handlers")
    module._meet_before_broadcast(mesh())
    return "restored"
