"""Which chunks of its arrays a checkpoint has."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orbax_ext.plan.holders import StoredChunks
from orbax_ext.storage.checkpoint.arrays import stored_chunks


def test_chunks_are_listed_by_their_place_in_the_grid(tmp_path: pathlib.Path) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    tree = {
        "a": {"c": jax.device_put(np.zeros((4, 6), np.float32), sharding)},
        "scalar": jax.device_put(np.int32(1), sharding),
        "long": jax.device_put(np.zeros(8, np.int8), sharding),
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    save_args = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=4 if array.ndim == 1 else None), tree)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "item", args=ocp.args.PyTreeSave(tree, save_args=save_args))
    found = stored_chunks(epath.Path(tmp_path / "item"))
    assert found["a.c"] == StoredChunks((4, 6), (4, 6), frozenset({(0, 0)}))
    assert found["scalar"] == StoredChunks((), (), frozenset({()}))
    assert found["long"].shape == (8,)
    assert {chunk[0] for chunk in found["long"].present} == set(range(8 // found["long"].chunk[0]))
