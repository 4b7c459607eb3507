"""Restores of stacked checkpoints as unstacked state, and the reverse, on real processes."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding

import orbax_ext
from orbax_ext import lab
from orbax_ext.options import Strategy
from orbax_ext.placement import stacked_restore
from tests.support.placement import EXPLICIT, P, assert_holds, make_mesh

ONE: dict[str, Any] = {
    "w": np.arange(48, dtype=np.float32).reshape(8, 6),
    "half": np.linspace(-1, 1, 16).astype(jax.numpy.bfloat16).reshape(4, 4),
    "step": np.asarray(9, np.int32),
}
SPECS = {"w": P(("a", "b"), "c"), "half": P(), "step": P(), "key": P()}
_ROWS = 8


def abstract(stacked: bool, types: Any) -> dict[str, Any]:
    mesh = make_mesh(types)
    leaves = {}
    for name, leaf in {**ONE, "key": jax.random.key(5)}.items():
        shape, spec = ((_ROWS, *leaf.shape), P(("b", "c"))) if stacked else (leaf.shape, SPECS[name])
        leaves[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    return leaves


def save(path: str, stacked: bool) -> None:
    one = {**ONE, "key": jax.random.key(5)}
    state = orbax_ext.stack(one, jax.devices()) if stacked else orbax_ext.replicate(one, make_mesh())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))


def restore(path: str, stacked: bool, allow: bool, types: Any, strategy: Strategy) -> str:
    """Restores as stacked or not, whatever the checkpoint is; returns the error and its notes if it fails."""
    tree = abstract(stacked, types)
    args = ocp.args.PyTreeRestore(tree, restore_args=orbax_ext.restore_args(tree, stacked=allow))
    with (
        orbax_ext.registered(replica_axis="b", strategy=strategy),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer,
        jax.set_mesh(make_mesh(types)),
    ):
        try:
            restored = checkpointer.restore(path, args=args)
        except Exception as error:
            return f"{error}\n" + "\n".join(getattr(error, "__notes__", []))
    for name, expected in {**ONE, "key": np.asarray(jax.random.key_data(jax.random.key(5)))}.items():
        assert restored[name].sharding.is_equivalent_to(tree[name].sharding, len(tree[name].shape))
        assert restored[name].dtype == tree[name].dtype
        data = jax.random.key_data(restored[name]) if name == "key" else restored[name]
        assert_holds(data, np.broadcast_to(expected, (_ROWS, *expected.shape)) if stacked else expected)
        if name != "key":
            assert restored[name].sharding == tree[name].sharding
    return ""


def fail(path: str, how: str) -> str:
    """Restores while process 1 can't read the stored shapes before the restore; returns the error."""
    stored_shapes = stacked_restore._stored_shapes

    async def stored(*given: Any) -> Any:
        if jax.process_index() != 1:
            return await stored_shapes(*given)
        if how == "raises":
            raise OSError("the disk is gone")
        return await asyncio.Event().wait()

    tree = abstract(False, (EXPLICIT,) * 3)
    args = ocp.args.PyTreeRestore(tree, restore_args=orbax_ext.restore_args(tree, stacked=True))
    limit = 2.0 if jax.process_index() == 1 else 300.0
    with (
        mock.patch.object(stacked_restore, "_stored_shapes", stored),
        orbax_ext.registered(replica_axis="b", strategy="spread", stall_timeout=limit),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer,
        pytest.raises(orbax_ext.RestoreError) as raised,
    ):
        checkpointer.restore(path, args=args)
    return str(raised.value)


@pytest.fixture(scope="session")
def stacked_checkpoint(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("stacked") / "checkpoint")
    cluster.run(save, path, True)
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "OSError: the disk is gone"), ("hangs", "storage has not answered for 2 s (stall_timeout)")],
)
def test_a_process_that_can_not_read_the_stored_shapes_fails_for_all(
    several: lab.Cluster, stacked_checkpoint: str, how: str, message: str
) -> None:
    for error in several.run(fail, stacked_checkpoint, how):
        assert "process 1" in error
        assert message in error


@pytest.mark.parametrize("strategy", ["single", "spread", "direct"])
def test_a_stacked_checkpoint_restores_unstacked(cluster: lab.Cluster, stacked_checkpoint: str, strategy: str) -> None:
    types = (EXPLICIT,) * 3
    assert set(cluster.run(restore, stacked_checkpoint, False, True, types, strategy)) == {""}


def test_a_stacked_checkpoint_restores_stacked(cluster: lab.Cluster, stacked_checkpoint: str) -> None:
    assert set(cluster.run(restore, stacked_checkpoint, True, True, (EXPLICIT,) * 3, "auto")) == {""}


def test_the_error_without_the_flag_names_the_flag(cluster: lab.Cluster, stacked_checkpoint: str) -> None:
    for error in cluster.run(restore, stacked_checkpoint, False, False, (EXPLICIT,) * 3, "auto"):
        assert "differ by a leading axis, as if one side were pmap's stacked state" in error
        assert "leaf half and 2 more differ" in error
        assert "(8, 4, 4) in the checkpoint, (4, 4) asked for" in error
        assert "orbax_ext.restore_args(abstract, stacked=True)" in error


def test_an_unstacked_checkpoint_restores_stacked(cluster: lab.Cluster, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "checkpoint")
    cluster.run(save, path, False)
    assert set(cluster.run(restore, path, True, True, (EXPLICIT,) * 3, "auto")) == {""}


def test_only_the_first_row_is_read_from_storage(cluster: lab.Cluster, tmp_path: pathlib.Path) -> None:
    """The files of the other rows are corrupted: reading the whole array fails, reading one row does not."""
    path = tmp_path / "checkpoint"
    cluster.run(save, str(path), True)
    rows = [file for name in ONE for file in (path / name).iterdir() if not file.name.startswith(".")]
    others = [file for file in rows if not file.name.startswith("0")]
    assert len(rows) == _ROWS * len(ONE)
    assert len(others) == (_ROWS - 1) * len(ONE)
    for file in others:
        file.write_bytes(b"corrupted")
    for name in ONE:
        whole = ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / name)}}).result()
        assert whole[0].read().result().shape == ONE[name].shape
        with pytest.raises(ValueError, match=name):
            whole.read().result()
    assert set(cluster.run(restore, str(path), False, True, (EXPLICIT,) * 3, "auto")) == {""}
