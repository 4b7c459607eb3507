from __future__ import annotations

import pathlib
import time
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath

from orbax_ext.storage.checkpoint import item_tree
from orbax_ext.storage.checkpoint.item_tree import ArrayFormat

STATE: dict[str, Any] = {"params": [jnp.ones(4), {"w": jnp.ones((2, 2))}], "nothing": None, "empty": {}}
NAMES = ("params.0", "params.1.w")


def saved(tmp_path: pathlib.Path, ocdbt: bool, zarr3: bool) -> epath.Path:
    item = epath.Path(tmp_path / "item")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(item, args=ocp.args.PyTreeSave(STATE))
    return item


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, True), (True, False), (False, False)])
def test_the_tree_says_how_arrays_are_stored(tmp_path: pathlib.Path, ocdbt: bool, zarr3: bool) -> None:
    item = saved(tmp_path, ocdbt, zarr3)
    tree = item_tree.read_tree(item)
    assert item_tree.array_format(item, tree) == ArrayFormat(ocdbt, zarr3, every_chunk=True)


def test_empty_nodes_are_no_leaves(tmp_path: pathlib.Path) -> None:
    tree = item_tree.read_tree(saved(tmp_path, ocdbt=True, zarr3=True))
    assert item_tree.difference(tree, NAMES) == ""
    assert item_tree.difference(tree, [*NAMES, "step"]) == "lacks step"
    assert item_tree.difference(tree, ["step", "params.0"]) == "lacks step and also has params.1.w"


def test_a_tree_that_can_not_be_read_is_not_compared(tmp_path: pathlib.Path) -> None:
    item = epath.Path(tmp_path)
    (item / "_METADATA").write_text("{")
    for place in (item, item / "nowhere"):
        tree = item_tree.read_tree(place)
        assert tree is None
        assert item_tree.difference(tree, NAMES) == ""
        assert item_tree.array_format(place, tree) == ArrayFormat(ocdbt=True, zarr3=True, every_chunk=True)


def test_the_time_of_a_save_is_that_of_its_step(tmp_path: pathlib.Path) -> None:
    before = time.time()
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(1, args=ocp.args.PyTreeSave(STATE))
    saved_at = item_tree.save_time(epath.Path(tmp_path / "steps" / "1" / "default"))
    assert saved_at is not None
    assert before - 1 < saved_at < time.time() + 1
    (tmp_path / "_CHECKPOINT_METADATA").write_text('{"init_timestamp_nsecs": null}')
    assert item_tree.save_time(epath.Path(tmp_path / "item")) is None
    assert item_tree.save_time(epath.Path(tmp_path / "nowhere" / "item")) is None
