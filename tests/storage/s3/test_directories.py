from __future__ import annotations

from collections.abc import Iterator

import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from etils import epath

from orbax_ext.storage import s3 as s3_lib
from orbax_ext.storage.s3 import paths, settings
from orbax_ext.storage.s3.directories import EmptyDirectories
from orbax_ext.storage.s3.settings import Settings
from tests.support import s3_server, s3_stores
from tests.support.s3_checkpoints import check, restore, save
from tests.support.s3_proxy import FaultProxy


def test_a_directory_exists_with_those_above_it_until_it_is_filled_or_removed() -> None:
    empty = EmptyDirectories()
    empty.add("s3://bucket/run/0/default/")
    assert "s3://bucket/run/0/default" in empty
    assert "s3://bucket/run" in empty
    assert "s3://bucket/ru" not in empty
    assert empty.names_in("s3://bucket/run") == {"0"}
    assert empty.names_in("s3://bucket/run/0/default") == set()
    empty.moved("s3://bucket/run/0", "s3://bucket/run/1")
    assert empty.names_in("s3://bucket/run/") == {"1"}
    empty.filled("s3://bucket/run/1/default/_METADATA")
    assert "s3://bucket/run" not in empty
    empty.add("s3://bucket/run/2")
    empty.add("s3://bucket/run/20")
    empty.removed("s3://bucket/run/2")
    assert empty.names_in("s3://bucket/run") == {"20"}


def test_no_key_ends_with_a_slash(s3: str, proxy: FaultProxy) -> None:
    save(s3, 0, 1, max_to_keep=1)
    paths = [request.line.partition(" ")[2] for request in proxy.requests if request.line.startswith("PUT")]
    assert paths
    assert not [path for path in paths if path.endswith("/")]


def test_a_directory_that_another_process_deletes_is_gone(s3: str, proxy: FaultProxy) -> None:
    directory = epath.Path(s3) / "0"
    directory.mkdir()
    assert directory.exists()
    assert list(directory.iterdir()) == []
    (directory / "file").write_text("x")
    raw_store(s3, proxy.url).write("run/0/file", None).result()
    assert not directory.exists()


def test_a_directory_that_is_filled_by_moving_and_deleted_by_another_process_is_gone(
    s3: str, proxy: FaultProxy
) -> None:
    root = epath.Path(s3)
    (root / "from" / "file").write_text("one")
    (root / "above" / "to").mkdir(parents=True)
    (root / "from").replace(root / "above" / "to")
    assert (root / "above" / "to" / "file").read_text() == "one"
    raw_store(s3, proxy.url).write("run/above/to/file", None).result()
    assert not (root / "above").exists()


@pytest.fixture
def takes_markers(s3: str, s3_port: int) -> Iterator[str]:
    """The URL of a store that takes keys with a slash at their end: moto, if the one of the other tests does not."""
    if s3_server.STORES[s3_server.STORE].takes_keys_that_end_with_a_slash:
        yield f"http://127.0.0.1:{s3_port}"
        return
    moto = s3_stores.Moto()
    if reason := moto.missing():
        pytest.skip(reason)
    with moto.running(bucket_in_host_name=False) as port:
        s3_server.make_bucket(port, s3.removeprefix("s3://").partition("/")[0])
        yield f"http://127.0.0.1:{port}"


def test_a_checkpoint_with_markers_is_listed_restored_moved_and_deleted(s3: str, takes_markers: str) -> None:
    """Earlier releases wrote an object for each directory, with a slash at the end of its key."""
    s3_lib.enable_s3(takes_markers, "us-east-1", retries=2, stall_seconds=2)
    save(s3, 0, 1)
    store = raw_store(s3, takes_markers)
    markers = [f"run/{name}" for name in ("", "0/", "0/default/", "0/default/d/", "1/", "1/default/", "1/empty/")]
    for marker in markers:
        store.write(marker, b"").result()
    assert {key.decode() for key in store.list().result()} >= set(markers)
    with ocp.CheckpointManager(s3) as manager:
        assert manager.all_steps() == [0, 1]
        check(manager.restore(1, args=ocp.args.PyTreeRestore()))
        assert (epath.Path(s3) / "1" / "empty").is_dir()  # nothing is in it but its marker
        assert list((epath.Path(s3) / "1" / "empty").iterdir()) == []
        manager.delete(1)
        assert not (epath.Path(s3) / "1" / "empty").exists()
        assert manager.all_steps() == [0]
    assert sorted(path.name for path in epath.Path(s3).iterdir()) == ["0"]
    (epath.Path(s3) / "0").rename(epath.Path(s3) / "7")
    check(restore(s3, 7))
    epath.Path(s3).rmtree()
    assert store.list().result() == []


def raw_store(s3: str, url: str) -> ts.KvStore:
    """Returns the bucket as TensorStore sees it: keys as they are."""
    return ts.KvStore.open(settings.kvstore(Settings(url, "us-east-1", retries=2), paths.split(s3)[0], "")).result()
