"""S3 on one process: settings, hooks and their removal, files, checkpoints whole and half, faults of the store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pathlib
import subprocess
import sys
import traceback
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint._src.path import atomicity_defaults
from orbax.checkpoint._src.serialization import tensorstore_utils

import orbax_ext
from orbax_ext.storage import s3 as s3_lib
from orbax_ext.storage.s3 import errors, files, settings
from orbax_ext.storage.s3.settings import Settings
from orbax_ext.upstream.object_stores import HOOKS
from tests.support import s3_server
from tests.support.s3_proxy import Fault, FaultProxy

STATE = {"weights": np.arange(4096, dtype=np.int32), "bias": np.ones((3,), np.float32), "step": 7}


# Settings


def resolved(given: Settings, **environ: str) -> Settings:
    return settings.resolve(given, {"AWS_CONFIG_FILE": "/dev/null", **environ})


def test_arguments_come_before_the_environment_and_the_environment_before_the_profile(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = r-default\n[profile lab]\nregion = r-lab\nendpoint_url = http://lab\n"
        "s3 =\n    addressing_style = virtual\n"
    )
    profile = {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "lab"}
    found = resolved(Settings(), **profile)
    assert (found.endpoint, found.region, found.addressing) == ("http://lab", "r-lab", "virtual")
    environ = {**profile, "AWS_ENDPOINT_URL": "http://env/", "AWS_REGION": "r-env"}
    found = resolved(Settings(), **environ)
    assert (found.endpoint, found.region) == ("http://env", "r-env")
    found = resolved(Settings("http://arg", "r-arg", addressing="path"), **environ)
    assert (found.endpoint, found.region, found.addressing) == ("http://arg", "r-arg", "path")


@pytest.mark.parametrize(
    ("environ", "endpoint", "region"),
    [
        ({}, None, None),
        ({"AWS_DEFAULT_REGION": "b"}, None, "b"),
        ({"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}, None, "a"),
        ({"AWS_ENDPOINT_URL": "http://all"}, "http://all", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://all", "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://all", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, None, None),
    ],
)
def test_endpoint_and_region_come_from_the_usual_variables(
    environ: dict[str, str], endpoint: str | None, region: str | None
) -> None:
    found = resolved(Settings(), **environ)
    assert (found.endpoint, found.region) == (endpoint, region)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Settings(region="eu-west-1"), {"bucket": "bkt", "aws_region": "eu-west-1"}),
        (Settings("http://minio:9000", "x"), {"bucket": "bkt", "endpoint": "http://minio:9000"}),
        (Settings("https://cwobject.com", "x", addressing="virtual"), {"endpoint": "https://bkt.cwobject.com"}),
        (Settings(None, "x", addressing="path"), {"bucket": "bkt", "endpoint": "https://s3.x.amazonaws.com"}),
        (Settings(region="x", profile="lab"), {"aws_credentials": {"type": "default", "profile": "lab"}}),
        (Settings(region="x", anonymous=True), {"aws_credentials": {"type": "anonymous"}}),
    ],
)
def test_the_spec_says_where_the_bucket_is_in_either_style(given: Settings, expected: dict[str, Any]) -> None:
    import tensorstore as ts

    spec = settings.kvstore(given, "bkt", "run/")
    assert expected.items() <= spec.items()
    assert ts.KvStore.Spec(spec).to_json()["path"] == "run/"  # TensorStore takes it


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint": "minio:9000"},
        {"endpoint": "http://user:password@minio:9000"},
        {"endpoint": "http://minio/?x=1"},
        {"addressing": "dns"},
        {"retries": 0},
        {"stall_seconds": 0},
    ],
)
def test_bad_settings_are_refused_at_once_without_showing_a_password(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|is one of") as error:
        s3_lib.enable_s3(**given)
    assert "password@" not in str(error.value)
    assert not s3_lib.s3_enabled()


# Enabling and disabling


def hooked() -> list[object]:
    """Everything that enabling S3 may change in other packages."""
    return [hook.owner.__dict__[hook.name] for hook in HOOKS]


@pytest.mark.core
def test_enabling_twice_is_once_and_disabling_undoes_it_exactly() -> None:
    before = hooked()
    s3_lib.enable_s3("http://127.0.0.1:1")
    enabled = hooked()
    assert all(one is not other for one, other in zip(before, enabled, strict=True))
    s3_lib.enable_s3("http://127.0.0.1:1")
    assert all(one is other for one, other in zip(enabled, hooked(), strict=True))
    s3_lib.enable_s3("http://127.0.0.1:2")  # other settings, still once
    s3_lib.disable_s3()
    s3_lib.disable_s3()
    assert all(one is other for one, other in zip(before, hooked(), strict=True))


def test_register_enables_s3_and_unregister_disables_it_unless_it_was_enabled_before() -> None:
    orbax_ext.register()
    assert s3_lib.s3_enabled()
    orbax_ext.unregister()
    assert not s3_lib.s3_enabled()
    with orbax_ext.registered():
        assert s3_lib.s3_enabled()
    assert not s3_lib.s3_enabled()
    s3_lib.enable_s3("http://127.0.0.1:1")
    with orbax_ext.registered():
        pass
    assert s3_lib.s3_enabled()
    s3_lib.disable_s3()


SPECS = [
    {"directory": "gs://bucket/run/0/default", "use_ocdbt": True},
    {"directory": "gs://bucket/run/0/default", "name": "weights", "use_ocdbt": False},
    {"directory": "/data/run/0/default", "use_ocdbt": True},
    {"directory": "/data/s3:/0/default", "name": "weights", "use_ocdbt": False},
]


@pytest.mark.parametrize("arguments", SPECS)
def test_gs_and_local_paths_are_treated_as_before(arguments: dict[str, Any]) -> None:
    def seen() -> list[Any]:
        path = epath.Path(arguments["directory"])
        return [
            tensorstore_utils.build_kvstore_tspec(**arguments),
            atomicity_defaults.get_default_temporary_path_class(path),
            atomicity_defaults.get_item_default_temporary_path_class(path),
            type(path._backend),
        ]

    before = seen()
    s3_lib.enable_s3("http://127.0.0.1:1")
    try:
        assert seen() == before
    finally:
        s3_lib.disable_s3()
    assert seen() == before


def test_an_s3_spec_is_what_orbax_builds_for_gs_with_the_store_changed() -> None:
    s3_lib.enable_s3("http://127.0.0.1:1", "r")
    try:
        build = tensorstore_utils.build_kvstore_tspec
        theirs, ours = build("gs://bkt/run/0", use_ocdbt=True), build("s3://bkt/run/0", use_ocdbt=True)
    finally:
        s3_lib.disable_s3()
    assert (ours["base"]["driver"], ours["base"]["bucket"], ours["base"]["path"]) == ("s3", "bkt", "run/0")
    assert {**ours, "base": None} == {**theirs, "base": None}


def test_nothing_of_s3_is_imported_until_it_is_needed() -> None:
    program = (
        "import sys, orbax_ext; from orbax_ext import storage; orbax_ext.register(); "
        "sys.exit(bool({'s3fs', 'botocore', 'aiobotocore', 'aiohttp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_a_missing_s3fs_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    s3_lib.enable_s3("http://127.0.0.1:1")
    try:
        with pytest.raises(ImportError, match=r"pip install 'orbax-ext\[s3\]'"):
            epath.Path("s3://bucket/run").exists()
    finally:
        s3_lib.disable_s3()


# Files


def test_files_and_directories_behave_as_elsewhere(s3: str, tmp_path: pathlib.Path) -> None:
    def story(root: epath.Path) -> list[Any]:
        told: list[Any] = [root.exists()]
        (root / "a" / "b").mkdir(parents=True)
        told += [(root / "a").is_dir(), (root / "a" / "b").exists(), list((root / "a" / "b").iterdir())]
        (root / "a" / "one.txt").write_text("eins")
        (root / "a" / "two.bin").write_bytes(b"\0\1")
        (root / "a" / "empty").write_bytes(b"")
        (root / "a" / "b" / "deep.txt").write_text("tief")
        told += [(root / "a" / "one.txt").read_text(), (root / "a" / "two.bin").read_bytes()]
        told += [(root / "a" / "empty").read_bytes(), (root / "a" / "one.txt").stat().length]
        told += [sorted(path.name for path in (root / "a").iterdir()), (root / "a" / "one.txt").is_dir()]
        told += [sorted(path.name for path in root.glob("a/*.txt")), sorted(path.name for path in root.glob("*/b"))]
        walked = [(path.relative_to(root), sorted(names), sorted(found)) for path, names, found in root.walk()]
        told.append([(str(path), names, found) for path, names, found in walked])
        (root / "a" / "b").rename(root / "c")
        told += [(root / "a" / "b").exists(), (root / "c" / "deep.txt").read_text()]
        (root / "a" / "one.txt").copy(root / "c" / "copy.txt")
        (root / "a" / "one.txt").unlink()
        told += [(root / "c" / "copy.txt").read_text(), (root / "a" / "one.txt").exists()]
        for action in (
            lambda: (root / "none").read_text(),
            lambda: (root / "none").unlink(),
            lambda: (root / "none").rmtree(),
            lambda: list((root / "none").iterdir()),
            lambda: (root / "none").stat(),
            lambda: (root / "a").mkdir(),
            lambda: (root / "c" / "copy.txt").copy(root / "c" / "deep.txt"),
        ):
            try:
                action()
                told.append("done")
            except OSError as error:
                told.append(
                    next(kind.__name__ for kind in (FileNotFoundError, FileExistsError) if isinstance(error, kind))
                )
        (root / "a").mkdir(exist_ok=True)
        root.rmtree()
        told.append(root.exists())
        return told

    assert story(epath.Path(s3)) == story(epath.Path(tmp_path / "run"))


def test_a_file_too_large_for_one_request_is_read_all_the_same(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WHOLE", 1000)
    content = bytes(range(256)) * 40
    path = epath.Path(s3) / "large"
    path.write_bytes(content)
    assert path.read_bytes() == content


@pytest.mark.parametrize("mode", ["w", "wb", "a"])
def test_a_file_is_written_as_a_whole_or_not_at_all(s3: str, proxy: FaultProxy, mode: str) -> None:
    path = epath.Path(s3) / "file"
    with contextlib.suppress(ZeroDivisionError), path.open(mode) as file:
        file.write("half" if mode != "wb" else b"half")
        raise ZeroDivisionError
    assert not path.exists()
    proxy.faults.append(Fault("denied", "PUT "))
    with pytest.raises(PermissionError, match=f"{path}: AccessDenied"):
        path.write_text("x")
    assert not path.exists()
    proxy.calm()
    path.write_text("one")
    with path.open("a") as file:
        file.write(", two")
    assert path.read_text() == "one, two"


keys = st.lists(
    st.lists(st.sampled_from(["0", "default", "d", "commit_success.txt", "x"]), min_size=1, max_size=4).map("/".join),
    unique=True,
    max_size=40,
)


@given(keys)
def test_commit_files_go_first_and_nothing_is_forgotten(names: list[str]) -> None:
    order = [key for batch in files.deletion_order(names) for key in batch]
    assert sorted(order) == sorted(names)
    is_commit = [key.rsplit("/", 1)[-1] == "commit_success.txt" for key in order]
    assert is_commit == sorted(is_commit, reverse=True)


# Checkpoints


def save(path: str, *steps: int, **options: Any) -> None:
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.PyTreeSave(STATE))
        manager.wait_until_finished()


def restore(path: str, step: int | None = None) -> dict[str, Any]:
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        return manager.restore(manager.latest_step() if step is None else step, args=ocp.args.PyTreeRestore())


def check(restored: dict[str, Any]) -> None:
    assert restored["step"] == STATE["step"]
    for name in ("weights", "bias"):
        assert np.asarray(restored[name]).tobytes() == np.asarray(STATE[name]).tobytes()


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


def test_old_steps_may_be_moved_away_instead(s3: str) -> None:
    save(s3, 0, 1, max_to_keep=1, todelete_subdir="trash")
    assert sorted(path.name for path in epath.Path(s3).iterdir()) == ["1", "trash"]
    check(restore(f"{s3}/trash", 0))


def test_a_checkpointer_saves_and_restores(s3: str) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(f"{s3}/one", args=ocp.args.PyTreeSave(STATE))
        check(checkpointer.restore(f"{s3}/one", args=ocp.args.PyTreeRestore()))


def test_arrays_without_ocdbt_work_too(s3: str) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(f"{s3}/one", args=ocp.args.PyTreeSave(STATE))
        check(checkpointer.restore(f"{s3}/one", args=ocp.args.PyTreeRestore()))


def test_the_v1_api_saves_and_loads(s3: str) -> None:
    from orbax.checkpoint.experimental import v1

    v1.save_pytree(f"{s3}/one", STATE)
    check(v1.load_pytree(f"{s3}/one"))
    with v1.training.Checkpointer(f"{s3}/many") as checkpointer:
        checkpointer.save_pytree(3, STATE)
        assert [found.step for found in checkpointer.checkpoints] == [3]
        check(checkpointer.load_pytree(3))


def test_the_handler_restores_sharded_arrays_and_counts_requests(s3: str) -> None:
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((1,), ("dp",))
    state = {"weights": jax.device_put(np.arange(4096.0), NamedSharding(mesh, PartitionSpec()))}
    with ocp.CheckpointManager(s3) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        with orbax_ext.registered(replica_axis="dp"):
            restored = manager.restore(0, args=ocp.args.StandardRestore(abstract))
    assert np.asarray(restored["weights"]).tobytes() == np.arange(4096.0, dtype=np.float32).tobytes()


def test_a_restore_does_not_hide_what_happens_beside_it(s3: str) -> None:
    """A save in the background goes on while another step is restored, and must see its own files."""
    save(s3, 0)
    beside = epath.Path(s3) / "1"
    with s3_lib._store.restoring(f"{s3}/0", together=False):  # type: ignore[union-attr]
        assert (epath.Path(s3) / "0" / "default").exists()
        assert not beside.exists()
        beside.mkdir()
        assert beside.exists()
        assert sorted(path.name for path in epath.Path(s3).iterdir()) == ["0", "1"]


def test_virtual_host_style(proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No such host needs to exist: both clients ask their HTTP proxy for it, and that is ours.
    for name, value in {**s3_server.ENVIRONMENT, "http_proxy": proxy.url, "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    s3_lib.enable_s3("http://store.test", "us-east-1", addressing="virtual")
    try:
        save(f"s3://{bucket}/run", 0)
        check(restore(f"s3://{bucket}/run"))
    finally:
        s3_lib.disable_s3()
    assert {request.line.split("/")[1].partition("?")[0] for request in proxy.requests} == {bucket}


# Half a checkpoint


@pytest.mark.parametrize("lost", ["1/commit_success", "1/default/_METADATA", "1/default/.*manifest"])
def test_a_checkpoint_interrupted_half_way_is_never_taken_for_a_complete_one(
    s3: str, proxy: FaultProxy, lost: str
) -> None:
    save(s3, 0)
    proxy.faults.append(Fault("denied", f"PUT .*/{lost}"))
    with pytest.raises(Exception, match=r"denied|Denied|DENIED"):
        save(s3, 1)
    assert proxy.faults[0].hits
    proxy.calm()
    assert (epath.Path(s3) / "1").exists()  # half of it is there
    with ocp.CheckpointManager(s3, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.latest_step() == 0
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, pytest.raises(ValueError, match="incomplete"):
        checkpointer.restore(f"{s3}/1", args=ocp.args.PyTreeRestore())
    save(s3, 1)  # a new attempt replaces it
    check(restore(s3, 1))


def test_a_checkpoint_deleted_half_way_is_never_taken_for_a_complete_one(s3: str, proxy: FaultProxy) -> None:
    save(s3, 0, 1)
    proxy.faults.append(Fault("denied", r"POST .*\?delete", skip=1))
    with pytest.raises(PermissionError):
        (epath.Path(s3) / "1").rmtree()
    proxy.calm()
    assert (epath.Path(s3) / "1" / "default" / "_METADATA").exists()  # most of it is there
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


# A store that fails


@pytest.fixture(scope="module")
def saved(s3_port: int) -> str:
    """A checkpoint of `STATE` as step 0, saved once. Nothing may write to it."""
    s3_server.make_bucket(s3_port, "faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.ENVIRONMENT.items():
            patch.setenv(name, value)
        s3_lib.enable_s3(f"http://127.0.0.1:{s3_port}", stall_seconds=2)
        save("s3://faults/run", 0)
        s3_lib.disable_s3()
    return "s3://faults/run"


PASSING = {
    "a burst of 500": [Fault("500", times=2)],
    "a burst of 503": [Fault("503", times=2)],
    "500 on array data": [Fault("500", "GET .*/d/", times=2)],
    "503 on the manifest": [Fault("503", "GET .*manifest", times=2)],
    "resets in mid-body of metadata": [Fault("reset", "GET .*_METADATA", times=2)],
    "resets in mid-body of data": [Fault("reset", "GET .*/d/", times=2)],
    "short metadata": [Fault("short", "GET .*_METADATA", times=2)],
    "short data": [Fault("short", "GET .*/d/", times=2)],
    "slow bytes": [Fault("slow", "GET ")],
    "a silent connection": [Fault("stall", "GET .*/d/", times=1)],
}


@pytest.mark.parametrize("faults", PASSING.values(), ids=PASSING.keys())
def test_passing_faults_are_retried_and_the_state_is_whole(
    saved: str, s3: str, proxy: FaultProxy, faults: list[Fault]
) -> None:
    del s3
    proxy.faults += [Fault(fault.kind, fault.match, fault.times) for fault in faults]
    check(restore(saved))
    assert all(fault.hits for fault in proxy.faults)


LASTING = {
    "expired credentials, metadata": (Fault("expired", "GET .*_METADATA"), "renew the credentials"),
    "expired credentials, arrays": (Fault("expired", "GET .*manifest"), "renew the credentials"),
    "expired credentials, listing": (Fault("expired", "GET /[^/]*\\?"), "renew the credentials"),
    "access denied, metadata": (Fault("denied", "GET .*_METADATA"), "bucket policy"),
    "access denied, arrays": (Fault("denied", "GET .*/d/"), "bucket policy"),
    "throttled for good, arrays": (Fault("503", "GET .*manifest"), "try again later"),
    "broken for good, arrays": (Fault("500", "GET .*manifest"), "try again later"),
    "broken for good, metadata": (Fault("500", "GET .*_METADATA"), "try again later"),
    "short for good, arrays": (Fault("short", "GET .*manifest"), "check the endpoint"),
}


@pytest.mark.parametrize(("fault", "remedy"), LASTING.values(), ids=LASTING.keys())
def test_lasting_faults_are_errors_that_name_the_place_and_the_remedy_but_no_secret(
    saved: str, s3: str, proxy: FaultProxy, fault: Fault, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    del s3
    proxy.faults.append(Fault(fault.kind, fault.match))
    with pytest.raises((OSError, ValueError)) as error:
        restore(saved, 0)
    assert saved in str(error.value)
    assert remedy in str(error.value)
    told = "".join(traceback.format_exception(error.value)) + caplog.text
    assert s3_server.SECRET_KEY not in told
    assert s3_server.SESSION_TOKEN not in told


ANSWER = (
    f"ExpiredToken: [http_response_body='<Error><Token-0>{s3_server.SESSION_TOKEN}</Token-0></Error>'] [more='...']"
)


async def leave_behind_a_failed_read() -> None:
    """As Orbax does when another read has failed first: asyncio logs what nobody asked for."""

    async def read() -> None:
        try:
            raise OSError(ANSWER)
        except OSError as cause:
            raise ValueError(ANSWER) from cause

    asyncio.gather(read())
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()


def test_reads_that_nobody_waited_for_are_logged_without_a_secret(
    s3: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    asyncio.run(leave_behind_a_failed_read())
    assert "never retrieved" in caplog.text
    assert "ExpiredToken" in caplog.text
    assert s3_server.SESSION_TOKEN not in caplog.text
    caplog.clear()
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])
    asyncio.run(leave_behind_a_failed_read())
    assert s3_server.SESSION_TOKEN in caplog.text  # what asyncio says by itself


def test_an_error_while_saving_holds_no_secret_either(
    s3: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.faults.append(Fault("expired", "PUT .*/(d/|manifest)"))
    with pytest.raises((OSError, ValueError), match="renew the credentials") as error:
        save(s3, 0)
    told = "".join(traceback.format_exception(error.value)) + caplog.text
    assert s3_server.SECRET_KEY not in told
    assert s3_server.SESSION_TOKEN not in told


def test_a_missing_bucket_is_named(s3: str) -> None:
    del s3
    with pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket.*create the bucket"):
        save("s3://no-such-bucket/run", 0)


@pytest.mark.parametrize(
    "text",
    [
        "PERMISSION_DENIED: no [http_response_code='403'] [http_response_body='<a>&SECRET</a>']",
        "ABORTED: no [http_response_body='<a>SECRET\n[x=\\'y\\']</a>'] [http_response_code='500']",
        "ABORTED: no [http_response_body='<a>SECRET\n[x='y']SECRET</a>'] [http_response_code='500']",
        "failed: https://h/k?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",
        "<Error><Token-0>SECRET</Token-0><StringToSign>SECRET</StringToSign></Error>",
    ],
)
def test_secrets_are_withheld_wherever_they_stand(text: str) -> None:
    assert "SECRET" not in errors.explain("s3://bucket/key", text)
