"""What the stock single-replica handler is put through, on every process of a cluster of 4 x 4 devices."""

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

LATE = 45.0  # seconds; a gloo communicator that is being made gives up after 30
_REPLICAS = 1  # the index of the mesh axis "dp"

Tree = dict[str, Any]


def installed_version() -> str:
    return importlib.metadata.version("orbax-checkpoint")


def patterns() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of many types, with the values that a sum over replicas does not keep."""
    floats = {np.dtype(name): _all_bits(name) for name in ("float32", "float16", ml_dtypes.bfloat16)}
    found = {str(dtype): values for dtype, values in floats.items()}
    found["float8_e4m3fn"] = _all_bits(ml_dtypes.float8_e4m3fn)
    found["bool"] = np.arange(512) % 3 == 0
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        found[name] = np.random.default_rng(7).integers(-128, 127, 512).astype(name)
    found["int4"] = (np.arange(512) % 16 - 8).astype(ml_dtypes.int4)
    found["complex64"] = _all_bits("float32")[:512].view(np.complex64).repeat(2)
    return {name: values.reshape(-1, 32) for name, values in found.items()}


def _all_bits(dtype: Any) -> np.ndarray[Any, Any]:
    """512 numbers made of random bits: denormals, both zeros, quiet and signalling NaNs with payloads."""
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
    """Saves with plain Orbax, whatever single-replica handler is there."""
    placed = {name: _place(value, mesh()) for name, value in values.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(placed))


def _place(value: np.ndarray[Any, Any], over: Mesh) -> jax.Array:
    sharding = NamedSharding(over, PartitionSpec(None, "tp"))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@contextlib.contextmanager
def single_replica_handler() -> Iterator[None]:
    """The stock handler registered as its documentation tells."""
    before = type_handlers.get_type_handler(jax.Array)
    handler = type_handlers.SingleReplicaArrayHandler(replica_axis_index=_REPLICAS, primary_replica_id=0)
    type_handlers.register_type_handler(jax.Array, handler, override=True)
    try:
        yield
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)


def restore(path: str, like: Tree, over: Mesh) -> Tree:
    sharding = NamedSharding(over, PartitionSpec(None, "tp"))
    args = {
        name: type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=sharding, global_shape=value.shape, dtype=value.dtype
        )
        for name, value in like.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found: Tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(dict(like), restore_args=args))
    return found


def differences(found: Tree, wanted: Tree) -> dict[str, str]:
    """Leaves whose type or bytes on this process's devices are not those wanted."""
    wrong = {}
    for name, value in wanted.items():
        array = found[name]
        if array.dtype != value.dtype:
            wrong[name] = f"{value.dtype} came back as {array.dtype}"
        elif any(
            np.asarray(shard.data).tobytes() != value[shard.index].tobytes() for shard in array.addressable_shards
        ):
            wrong[name] = "other bytes"
    return wrong


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
    """Each clique of the broadcast is a pair of processes that have no communicator yet; the primary reads late."""
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


def spoil(path: str) -> None:
    """Cuts short what is stored of one leaf; its description stays whole."""
    chunks = [file for file in pathlib.Path(path, "w").iterdir() if not file.name.startswith(".")]
    for chunk in chunks:
        chunk.write_bytes(chunk.read_bytes()[:10])


def restore_spoilt(path: str) -> dict[str, str]:
    with single_replica_handler():
        return differences(restore(path, small(), mesh()), small())


def save_after_restore(path: str) -> dict[str, str]:
    """Registers once the checkpointer is there, as training programs do, and then goes on to train and save."""
    again = f"{path}.again"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, single_replica_handler():
        found = restore(path, small(), mesh())
        checkpointer.save(again, args=ocp.args.PyTreeSave(found), force=True)
        return differences(restore(again, small(), mesh()), small())


def restore_without_process_3(path: str) -> str:
    """The others reach the meeting before the broadcast; nobody else would wait for process 3 there."""
    os.environ["ORBAX_PRE_BROADCAST_TIMEOUT_SECS"] = "3"
    if jax.process_index() == 3:
        return "stayed away"
    module = importlib.import_module("orbax.checkpoint._src.serialization.jax_array_handlers")
    module._meet_before_broadcast(mesh())
    return "restored"
