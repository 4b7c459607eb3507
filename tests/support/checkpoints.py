"""A checkpoint of one process, in every format, for the commands that read checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FORMATS = {
    "zarr2 in OCDBT": (False, True),
    "zarr2": (False, False),
    "zarr3 in OCDBT": (True, True),
    "zarr3": (True, False),
}
LARGE = 2 << 20  # bytes of the largest array, which does not compress


def state() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    random = np.random.default_rng(0)

    def put(array: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(jnp.asarray(array), NamedSharding(mesh, spec))

    return {
        "params": {
            "large": put(random.integers(0, 2**32, LARGE // 4, np.uint32).reshape(512, -1), PartitionSpec(None, "tp")),
            "layers": [put(np.ones((8, 16), jnp.bfloat16), PartitionSpec(("dp", "tp")))],
        },
        "step": put(np.int32(7), PartitionSpec()),
        "key": jax.random.key(0),
        "table": np.arange(5),
        "count": 3,
        "name": "a string",
        "nothing": None,
    }


def save(path: pathlib.Path | str, form: str = "zarr2 in OCDBT", steps: tuple[int, ...] = (0,)) -> None:
    """Saves `state()` as some steps, in one of `FORMATS`."""
    zarr3, in_database = FORMATS[form]
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=zarr3, use_ocdbt=in_database)
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=LARGE // 8), state())
    with ocp.CheckpointManager(path, item_handlers=handler) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.PyTreeSave(state(), save_args=chunked))
        manager.wait_until_finished()
