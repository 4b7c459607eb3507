"""Checkpoints on S3 with every API of Orbax, on one process: whole ones, and those that were left half-way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.path import atomicity_defaults
from orbax.checkpoint.experimental import v1

import orbax_ext
from orbax_ext.storage import s3 as s3_lib
from tests.support import s3_server, s3_stores
from tests.support.s3_checkpoints import STATE, check, restore, save
from tests.support.s3_proxy import Fault, FaultProxy


@pytest.mark.parametrize("background", [False, True])
def test_a_manager_saves_lists_deletes_and_restores(s3: str, background: bool) -> None:
    save(s3, 0, 1, 2, max_to_keep=2, enable_async_checkpointing=background)
    with ocp.CheckpointManager(s3) as manager:
        assert (manager.all_steps(), manager.latest_step()) == ([1, 2], 2)
        check(manager.restore(2, args=ocp.args.PyTreeRestore()))
        manager.delete(2)
        assert manager.latest_step() == 1
    assert sorted(path.name for path in epath.Path(s3).iterdir()) == ["1"]
    check(restore(s3))


def test_old_steps_may_be_moved_away_instead_of_deleted(s3: str) -> None:
    save(s3, 0, 1, max_to_keep=1, todelete_subdir="trash")
    assert sorted(path.name for path in epath.Path(s3).iterdir()) == ["1", "trash"]
    check(restore(f"{s3}/trash", 0))


def test_a_step_without_its_commit_file_is_skipped_and_named(s3: str) -> None:
    save(s3, 0, 1)
    with ocp.CheckpointManager(s3) as manager:
        (epath.Path(s3) / "1" / "commit_success.txt").unlink()
        assert manager.latest_step() == 1
        latest = orbax_ext.restore_latest_valid(manager, ocp.args.PyTreeRestore())
    assert latest.step == 0
    assert latest.skipped == {1: "its commit file commit_success.txt is missing: the save of this step did not finish"}
    check(latest.state)


def test_a_checkpointer_saves_and_restores(s3: str) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{s3}/one", args=ocp.args.PyTreeSave(STATE))
        check(checkpointer.restore(f"{s3}/one", args=ocp.args.PyTreeRestore()))


def test_arrays_without_ocdbt_are_saved_and_restored(s3: str) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(f"{s3}/one", args=ocp.args.PyTreeSave(STATE))
        check(checkpointer.restore(f"{s3}/one", args=ocp.args.PyTreeRestore()))


def test_the_v1_api_saves_and_loads(s3: str) -> None:
    v1.save_pytree(f"{s3}/one", STATE)
    check(v1.load_pytree(f"{s3}/one"))
    with v1.training.Checkpointer(f"{s3}/many") as checkpointer:
        checkpointer.save_pytree(3, STATE)
        assert [saved.step for saved in checkpointer.checkpoints] == [3]
        check(checkpointer.load_pytree(3))


def test_the_handler_restores_sharded_arrays(s3: str) -> None:
    mesh = jax.make_mesh((1,), ("dp",))
    state = {"weights": jax.device_put(np.arange(4096.0), NamedSharding(mesh, PartitionSpec()))}
    with ocp.CheckpointManager(s3) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        with orbax_ext.registered(replica_axis="dp"):
            restored = manager.restore(0, args=ocp.args.StandardRestore(abstract))
    assert np.asarray(restored["weights"]).tobytes() == np.arange(4096.0, dtype=np.float32).tobytes()


@pytest.mark.parametrize("exchange", ["result", "background"])
@pytest.mark.parametrize("api", ["v0", "v1"])
def test_a_pending_restore_enables_s3_itself_until_it_has_ended(
    s3: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, api: str, exchange: Literal["result", "background"]
) -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = {"weights": jax.device_put(np.arange(1 << 18, dtype=np.float32), here)}
    abstract = {"weights": jax.ShapeDtypeStruct((1 << 18,), np.float32, sharding=here)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{s3}/v0", args=ocp.args.PyTreeSave(state))
    getattr(v1, "save", v1.save_pytree)(f"{s3}/v1", state)
    s3_lib.disable_s3()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with contextlib.ExitStack() as stack:
        if api == "v1":
            pending = orbax_ext.v1.load_async(f"{s3}/v1", abstract, exchange=exchange)
        else:
            checkpointer = stack.enter_context(ocp.Checkpointer(ocp.PyTreeCheckpointHandler()))
            args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
            pending = orbax_ext.restore_async(checkpointer, f"{s3}/v0", args, exchange=exchange)
        deadline = time.monotonic() + 60
        while not pending.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert pending.exception() is None
        assert pending.progress().done >= 4 << 18
        restored = pending.result()
    assert np.asarray(restored["weights"]).tobytes() == np.asarray(state["weights"]).tobytes()
    assert not s3_lib.s3_enabled()


def test_a_restore_does_not_hide_new_steps_beside_it(s3: str) -> None:
    """A save in the background continues while another step is restored, and must see its own files."""
    save(s3, 0)
    beside = epath.Path(s3) / "1"
    with s3_lib._store.restoring(f"{s3}/0", together=False):  # type: ignore[union-attr]
        assert (epath.Path(s3) / "0" / "default").exists()
        assert not beside.exists()
        beside.mkdir()
        assert beside.exists()
        assert sorted(path.name for path in epath.Path(s3).iterdir()) == ["0", "1"]


@pytest.fixture
def host_names(s3_port: int) -> Iterator[FaultProxy]:
    """A proxy in front of a server that takes the bucket from the host name."""
    del s3_port  # skips the test if there is no server
    with s3_server.running(bucket_in_host_name=True) as port, FaultProxy(port) as proxy:
        yield proxy


def test_a_bucket_may_be_in_the_host_name(host_names: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    # The host need not exist: both clients send their requests to the HTTP proxy, which is ours.
    for name, value in {**s3_server.ENVIRONMENT, "http_proxy": host_names.url, "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    s3_server.make_bucket(host_names.port, "in-the-host", f"in-the-host.{s3_stores.HOST}")
    s3_lib.enable_s3(f"http://{s3_stores.HOST}", "us-east-1", addressing="virtual")
    try:
        save("s3://in-the-host/run", 0)
        check(restore("s3://in-the-host/run"))
    finally:
        s3_lib.disable_s3()
    assert {request.line.split("/")[1].partition("?")[0] for request in host_names.requests} == {"in-the-host"}


@pytest.mark.parametrize("lost", ["1/commit_success", "1/default/_METADATA", "1/default/.*manifest"])
def test_a_checkpoint_saved_half_way_never_counts_as_complete(s3: str, proxy: FaultProxy, lost: str) -> None:
    save(s3, 0)
    proxy.faults.append(Fault("denied", f"PUT .*/{lost}"))
    with pytest.raises(Exception, match=r"denied|Denied|DENIED"):
        save(s3, 1)
    assert proxy.faults[0].hits
    proxy.calm()
    assert (epath.Path(s3) / "1").exists()  # it was written in part
    with ocp.CheckpointManager(s3, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() == 0
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, pytest.raises(ValueError, match="incomplete"):
        checkpointer.restore(f"{s3}/1", args=ocp.args.PyTreeRestore())
    save(s3, 1)  # a second save replaces it
    check(restore(s3, 1))


def test_a_checkpoint_deleted_half_way_never_counts_as_complete(s3: str, proxy: FaultProxy) -> None:
    save(s3, 0, 1)
    proxy.faults.append(Fault("denied", r"POST .*\?delete", skip=1))
    with pytest.raises(PermissionError):
        (epath.Path(s3) / "1").rmtree()
    proxy.calm()
    assert (epath.Path(s3) / "1" / "default" / "_METADATA").exists()  # it was deleted in part
    with ocp.CheckpointManager(s3, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() == 0


def test_atomic_rename_is_refused_because_s3_has_none(s3: str) -> None:
    try:
        from orbax.checkpoint.options import AtomicityMode, AtomicityOptions
    except ImportError:
        pytest.skip("this Orbax has no AtomicityOptions")
    options = AtomicityOptions(mode=AtomicityMode.ATOMIC_RENAME)
    with pytest.raises(ValueError, match="no atomic rename"):
        atomicity_defaults.get_default_temporary_path_class(epath.Path(s3), atomicity_options=options)
