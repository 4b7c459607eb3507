"""Finds which defects the installed Orbax has, in seconds, by restoring small arrays with its own handler.

`probing.run` runs this module in a separate process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from orbax_ext.upstream.probing import RESULT


def main(names: list[str]) -> None:
    """Runs the named probes and prints their results."""
    results: dict[str, bool | str] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            try:
                results[name] = PROBES[name](directory)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(RESULT + json.dumps(results), flush=True)


def set_mesh(directory: str) -> bool:
    path = _save(directory, np.ones((2, 4), np.float32))
    try:
        with _stock_handler(), jax.set_mesh(_mesh()):
            _restore(path, np.ones((2, 4), np.float32))
    except ValueError as error:
        if "incompatible devices" in str(error):
            return True
        raise
    return False


def inexact(directory: str) -> bool:
    for number, value in enumerate([np.array([[-0.0, 1.0]], np.float32), np.array([[True, False]])]):
        path = _save(f"{directory}/{number}", value)
        with _stock_handler():
            restored = np.asarray(_restore(path, value))
        if restored.dtype != value.dtype or restored.tobytes() != value.tobytes():
            return True
    return False


def save_after_restore(directory: str) -> bool:
    value = np.ones((2, 4), np.float32)
    path = _save(f"{directory}/1", value)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, _stock_handler():
        restored = _restore(path, value)
        try:
            checkpointer.save(f"{directory}/2", args=ocp.args.PyTreeSave({"leaf": restored}))
        except ValueError as error:
            if "No ArrayMetadata found" in str(error):
                return True
            raise
    return False


def plain_args(directory: str) -> bool:
    handler = type_handlers.SingleReplicaArrayHandler()
    info = type_handlers.ParamInfo(name="leaf", parent_dir=epath.Path(directory))
    try:
        asyncio.run(handler.deserialize([info], [type_handlers.ArrayRestoreArgs(sharding=_sharding())]))
    except ValueError as error:
        if "SingleReplicaArrayRestoreArgs" in str(error):
            return True
        raise
    return False


def axis_types(directory: str) -> bool:
    explicit = jax.sharding.AxisType.Explicit
    sharding = _sharding((explicit, explicit))
    replica = type_handlers.SingleReplicaArrayHandler()._construct_single_replica_sharding(sharding)
    return bool(replica.mesh.axis_types != (explicit, explicit))


def one_mesh(directory: str) -> bool:
    value = np.ones((2, 4), np.float32)
    path = _save(directory, value)
    over_replicas = jax.sharding.NamedSharding(_mesh(), jax.sharding.PartitionSpec("replica"))
    try:
        with _stock_handler():
            _restore(path, value, over_replicas)
    except AssertionError:
        return True
    return False


def memory_kind(directory: str) -> bool:
    value = np.ones((2, 4), np.float32)
    path = _save(directory, value)
    with _stock_handler():
        restored = _restore(path, value, _sharding().with_memory_kind("pinned_host"))
    return bool(restored.sharding.memory_kind != "pinned_host")


def random_keys(directory: str) -> bool:
    keys = jax.random.split(jax.random.key(0), (2, 4))
    path = _save(directory, keys)
    try:
        with _stock_handler():
            restored = _restore(path, keys)
    except ValueError:  # before 0.11.38 Orbax expects the keys' data to have the shape of the keys
        return True
    return not jax.dtypes.issubdtype(restored.dtype, jax.dtypes.prng_key)


PROBES: dict[str, Callable[[str], bool]] = {
    function.__name__: function
    for function in (
        set_mesh,
        inexact,
        save_after_restore,
        plain_args,
        one_mesh,
        axis_types,
        memory_kind,
        random_keys,
    )
}


def _mesh(types: Any = None) -> Any:
    devices = np.array(jax.devices()).reshape(2, 1)
    return jax.sharding.Mesh(devices, ("replica", "shard"), axis_types=types)


def _sharding(types: Any = None) -> Any:
    return jax.sharding.NamedSharding(_mesh(types), jax.sharding.PartitionSpec(None, "shard"))


def _save(path: str, value: Any) -> str:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{path}/saved", args=ocp.args.PyTreeSave({"leaf": jax.device_put(value, _sharding())}))
    return f"{path}/saved"


def _restore(path: str, like: Any, sharding: Any = None) -> Any:
    args = type_handlers.SingleReplicaArrayRestoreArgs(
        sharding=sharding or _sharding(), global_shape=like.shape, dtype=like.dtype
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        item = ocp.args.PyTreeRestore({"leaf": like}, restore_args={"leaf": args})
        return checkpointer.restore(path, args=item)["leaf"]


@contextlib.contextmanager
def _stock_handler() -> Iterator[None]:
    """Registers Orbax's own single-replica handler for the block."""
    before = type_handlers.get_type_handler(jax.Array)
    type_handlers.register_type_handler(jax.Array, type_handlers.SingleReplicaArrayHandler(), override=True)
    try:
        yield
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)


if __name__ == "__main__":
    main(sys.argv[1:])
