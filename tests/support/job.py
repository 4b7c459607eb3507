"""A job of several processes with one CheckpointManager that lives on: what the stateful test lets it do.

The processes run these functions. Between two calls a process keeps its manager and what is registered.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

import orbax_ext
from orbax_ext.report.report import publish
from tests.support import states
from tests.support.states import P, Spec

FORMS = {"OCDBT": (True, False), "zarr2 files": (False, False), "zarr3 files": (False, True)}
SPECS = {
    "left": Spec((64, 16), "float32", P("tp")),
    "right": Spec((64, 16), "float32", P("tp")),  # the files of both fit in each other's place
    "own": Spec((8, 4), "bfloat16", P(("dp", "tp"))),  # each process reads its own part
    "step": Spec((), "int32"),
}
Digests = Mapping[str, str]  # of each leaf

_manager: ocp.CheckpointManager | None = None


def content(number: int) -> dict[str, np.ndarray]:
    """Returns the arrays of the `number`th save of a job."""
    return {
        name: states.random_array(100 * number + index, spec).copy() for index, (name, spec) in enumerate(SPECS.items())
    }


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


# Run on the processes.


def open_manager(path: str, form: str) -> None:
    """Opens the manager that later calls use; another one is closed, and nothing is registered any more."""
    global _manager
    if _manager is not None:
        _manager.close()
        unregister()
    ocdbt, zarr3 = FORMS[form]
    _manager = ocp.CheckpointManager(path, item_handlers=ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3))


def register(knobs: Mapping[str, Any]) -> None:
    unregister()
    orbax_ext.register(replica_axis="dp", stall_timeout=20, **knobs)


def unregister() -> None:
    with contextlib.suppress(ValueError):  # nothing is registered
        orbax_ext.unregister()


def save(step: int, number: int) -> None:
    shardings, data = states.shardings(SPECS, _mesh()), content(number)
    tree = {
        name: jax.make_array_from_callback(spec.shape, shardings[name], lambda at, name=name: data[name][at])
        for name, spec in SPECS.items()
    }
    _the_manager().save(step, args=ocp.args.PyTreeSave(tree))
    _the_manager().wait_until_finished()


def die_in_save(step: int, number: int) -> None:
    """Begins to save; the last process dies before it has written its arrays."""

    async def serialize(*args: Any, **kwargs: Any) -> Any:
        os._exit(9)

    if jax.process_index() == jax.process_count() - 1:
        with mock.patch.object(ocp.type_handlers.ArrayHandler, "serialize", serialize):
            save(step, number)
    save(step, number)


def delete(step: int) -> None:
    _the_manager().delete(step)


def steps() -> tuple[int | None, list[int]]:
    """Returns the manager's latest step, and all that it lists."""
    return _the_manager().latest_step(), sorted(_the_manager().all_steps())


def restore(step: int) -> tuple[bool, Digests]:
    """Returns whether orbax_ext restored the step, and the digests of the leaves."""
    publish(None)
    restored = _the_manager().restore(step, args=_arguments())
    return orbax_ext.last_report() is not None, _digests(restored)


def restore_latest_valid() -> tuple[int, Digests, list[int]]:
    """Returns the step, the digests of its leaves, and the steps that were skipped."""
    found = orbax_ext.restore_latest_valid(_the_manager(), _arguments(), stall_timeout=20)
    return found.step, _digests(found.state), list(found.skipped)


def _the_manager() -> ocp.CheckpointManager:
    assert _manager is not None
    return _manager


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("dp", "tp"))


def _arguments() -> ocp.args.PyTreeRestore:
    abstract = states.abstract_state(SPECS, _mesh())
    return ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))


def _digests(restored: Mapping[str, jax.Array]) -> Digests:
    """Returns the digests of the leaves; of the part here, if a leaf is not replicated on each process."""
    digests = {}
    for name, array in restored.items():
        parts = {str(shard.index): shard for shard in array.addressable_shards}
        whole = np.zeros(array.shape, array.dtype)
        for shard in parts.values():
            whole[shard.index] = np.asarray(shard.data)
        digests[name] = digest(whole)
    return digests
