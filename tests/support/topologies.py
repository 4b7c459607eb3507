"""A state saved on one topology or by one Orbax release, and restored on another. Run on the processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from tests.support import plain_orbax, states
from tests.support.states import P, Spec

SPECS = {
    "weights": Spec((32, 16), "bfloat16", P("tp")),
    "across": Spec((16, 32), "float32", P(None, "tp")),
    "fully_sharded": Spec((32, 8), "float32", P(("dp", "tp"))),
    "whole": Spec((7, 3), "int8"),
    "mask": Spec((32,), "bool", P("tp")),
    "step": Spec((), "int32"),
}
FORMATS = {
    f"{layout}_{driver}_{replicas}": (layout == "ocdbt", driver == "zarr3", replicas == "by_replica")
    for layout in ("ocdbt", "files")
    for driver in ("zarr2", "zarr3")
    for replicas in ("by_replica", "one_replica")
}


def mesh() -> Mesh:
    """Returns a mesh over all devices of the job: at most four data-parallel replicas of two or more devices."""
    replicas = min(4, jax.device_count() // 2)
    return Mesh(np.array(jax.devices()).reshape(replicas, -1), ("dp", "tp"))


def save(path: str, form: str | None = None) -> str:
    """Saves with plain Orbax in one of `FORMATS` or in the default format, and returns the Orbax release."""
    state: dict[str, Any] = states.make_state(SPECS, mesh())
    state["python"] = {"int": 3, "text": "saved", "nothing": None, "empty": {}}
    with ocp.Checkpointer(_handler(form)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))
    return str(ocp.__version__)


def compare(path: str, knobs: dict[str, Any]) -> plain_orbax.Comparison:
    abstract: dict[str, Any] = states.abstract_state(SPECS, mesh())
    abstract["python"] = {"int": 0, "text": "", "nothing": None, "empty": {}}
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)

    def restore() -> Any:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(abstract, restore_args=restore_args))
        arrays = {name: restored[name] for name in SPECS}
        assert states.differences(arrays, SPECS, mesh()) == []
        return restored

    return plain_orbax.compare(restore, knobs)


def _handler(form: str | None) -> ocp.PyTreeCheckpointHandler:
    if form is None:
        return ocp.PyTreeCheckpointHandler()
    ocdbt, zarr3, by_replica = FORMATS[form]
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=by_replica, array_metadata_store=None)
    registry = ocp.type_handlers.create_type_handler_registry(
        *[
            (kind, arrays if kind is jax.Array else ocp.type_handlers.get_type_handler(kind))
            for kind in ocp.type_handlers.supported_types()
        ]
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3, type_handler_registry=registry)
