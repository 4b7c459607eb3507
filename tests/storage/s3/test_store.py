"""Enabling and disabling S3: the hooks in Orbax and etils."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath
from etils.epath import gpath
from orbax.checkpoint._src.path import atomicity_defaults
from orbax.checkpoint._src.serialization import tensorstore_utils

import orbax_ext
from orbax_ext.storage import s3 as s3_lib
from orbax_ext.storage.s3.files import S3Files
from orbax_ext.storage.s3.store import S3Store
from orbax_ext.upstream.object_stores import FIRST_PATH_HOOKS, HOOKS


def hooked() -> list[object]:
    """Returns everything that enabling S3 may change in other packages."""
    return [hook.owner.__dict__[hook.name] for hook in HOOKS]


def test_the_hooks_cover_every_place_that_knows_url_schemes() -> None:
    places = [
        (tensorstore_utils, "build_kvstore_tspec"),
        (atomicity_defaults, "get_default_temporary_path_class"),
        (atomicity_defaults, "get_item_default_temporary_path_class"),
        (gpath._GPath, "_backend"),
        (ocp.CheckpointManager, "restore"),
        (ocp.Checkpointer, "restore"),
    ]
    hooks = [(hook.owner, hook.name) for hook in HOOKS]
    assert [place for place in places if place not in hooks] == []


@pytest.mark.core
def test_enabling_twice_hooks_once_and_disabling_undoes_it_exactly() -> None:
    before = hooked()
    s3_lib.enable_s3("http://127.0.0.1:1")
    enabled = hooked()
    assert all(one is not other for one, other in zip(before, enabled, strict=True))
    s3_lib.enable_s3("http://127.0.0.1:1")
    assert all(one is other for one, other in zip(enabled, hooked(), strict=True))
    s3_lib.enable_s3("http://127.0.0.1:2")  # other settings, still hooked once
    s3_lib.disable_s3()
    s3_lib.disable_s3()
    assert all(one is other for one, other in zip(before, hooked(), strict=True))


def test_register_enables_s3_when_the_first_path_is_used_and_unregister_disables_it() -> None:
    before = hooked()
    orbax_ext.register()
    assert not s3_lib.s3_enabled()
    changed = [hook for hook, old, new in zip(HOOKS, before, hooked(), strict=True) if old is not new]
    assert {(hook.owner, hook.name) for hook in changed} == {(hook.owner, hook.name) for hook in FIRST_PATH_HOOKS}
    assert isinstance(epath.Path("s3://bucket/run")._backend, S3Files)
    assert s3_lib.s3_enabled()
    assert isinstance(epath.Path("s3://bucket/other")._backend, S3Files)
    orbax_ext.unregister()
    assert not s3_lib.s3_enabled()
    assert all(one is other for one, other in zip(before, hooked(), strict=True))


def test_unregister_keeps_s3_that_the_user_has_enabled() -> None:
    s3_lib.enable_s3("http://127.0.0.1:1")
    with orbax_ext.registered():
        epath.Path("s3://bucket/run")._backend  # noqa: B018
    assert s3_lib.s3_enabled()
    s3_lib.disable_s3()
    with orbax_ext.registered():
        s3_lib.enable_s3("http://127.0.0.1:1")
    assert s3_lib.s3_enabled()
    s3_lib.disable_s3()


def test_s3_is_enabled_by_the_first_path_in_nested_registrations() -> None:
    before = hooked()
    with orbax_ext.registered():
        with orbax_ext.registered():
            assert isinstance(epath.Path("s3://bucket/run")._backend, S3Files)
        assert not s3_lib.s3_enabled()
        assert isinstance(epath.Path("s3://bucket/run")._backend, S3Files)
    assert all(one is other for one, other in zip(before, hooked(), strict=True))


def test_s3_stays_enabled_until_the_last_block_that_needs_it_ends() -> None:
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    with s3_lib.enabled_for("/local/run"):
        assert not s3_lib.s3_enabled()
    first.enter_context(s3_lib.enabled_for("s3://bucket/run"))
    second.enter_context(s3_lib.enabled_for("s3://bucket/other"))
    first.close()
    assert s3_lib.s3_enabled()
    second.close()
    assert not s3_lib.s3_enabled()
    with s3_lib.enabled_for("s3://bucket/run"):
        s3_lib.enable_s3("http://127.0.0.1:1")  # the user needs it from here on
    assert s3_lib.s3_enabled()
    s3_lib.disable_s3()


def test_a_block_that_needs_s3_and_a_registration_may_end_in_any_order() -> None:
    before = hooked()
    for registered_first in (False, True):
        blocks = [orbax_ext.registered(), s3_lib.enabled_for("s3://bucket/run")]
        first, second = (contextlib.ExitStack() for _ in blocks)
        for stack, block in zip((first, second), blocks if registered_first else blocks[::-1], strict=True):
            stack.enter_context(block)
            epath.Path("s3://bucket/run")._backend  # noqa: B018
        first.close()
        assert isinstance(epath.Path("s3://bucket/run")._backend, S3Files)
        second.close()
        assert all(one is other for one, other in zip(before, hooked(), strict=True))
    with contextlib.ExitStack() as needed:
        with orbax_ext.registered():
            epath.Path("s3://bucket/run")._backend  # noqa: B018
            needed.enter_context(s3_lib.enabled_for("s3://bucket/run"))
        assert s3_lib.s3_enabled()
    assert all(one is other for one, other in zip(before, hooked(), strict=True))


def test_a_checkpointer_s_first_restore_from_s3_is_inside_the_store_s_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each process would read the metadata of that restore for itself."""
    roots = []

    def restoring(store: S3Store, root: str, together: bool) -> contextlib.AbstractContextManager[None]:
        roots.append(root)
        raise NotADirectoryError(root)  # do not go on to the network

    monkeypatch.setattr(S3Store, "restoring", restoring)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with orbax_ext.registered(), pytest.raises(NotADirectoryError):
        checkpointer.restore("s3://bucket/run")
    checkpointer.close()
    assert roots == ["s3://bucket/run"]


def test_metadata_is_waited_for_within_the_limits_of_the_latest_registration() -> None:
    def stall_timeout() -> float:
        return s3_lib._limits[-1].stall

    with orbax_ext.registered(stall_timeout=10):
        with orbax_ext.registered(stall_timeout=20):
            assert stall_timeout() == 20
        assert stall_timeout() == 10
    assert stall_timeout() == 300


SPECS = [
    {"directory": "gs://bucket/run/0/default", "use_ocdbt": True},
    {"directory": "gs://bucket/run/0/default", "name": "weights", "use_ocdbt": False},
    {"directory": "/data/run/0/default", "use_ocdbt": True},
    {"directory": "/data/s3:/0/default", "name": "weights", "use_ocdbt": False},
]


@pytest.mark.parametrize("arguments", SPECS)
def test_gs_and_local_paths_are_treated_as_before(arguments: dict[str, Any]) -> None:
    def treatment() -> list[Any]:
        path = epath.Path(arguments["directory"])
        return [
            tensorstore_utils.build_kvstore_tspec(**arguments),
            atomicity_defaults.get_default_temporary_path_class(path),
            atomicity_defaults.get_item_default_temporary_path_class(path),
            type(path._backend),
        ]

    before = treatment()
    s3_lib.enable_s3("http://127.0.0.1:1")
    try:
        assert treatment() == before
    finally:
        s3_lib.disable_s3()
    assert treatment() == before


def test_an_s3_spec_is_the_one_for_gs_with_another_store() -> None:
    s3_lib.enable_s3("http://127.0.0.1:1", "r")
    try:
        build = tensorstore_utils.build_kvstore_tspec
        theirs, ours = build("gs://bkt/run/0", use_ocdbt=True), build("s3://bkt/run/0", use_ocdbt=True)
    finally:
        s3_lib.disable_s3()
    assert (ours["base"]["driver"], ours["base"]["bucket"], ours["base"]["path"]) == ("s3", "bkt", "run/0")
    assert {**ours, "base": None} == {**theirs, "base": None}


def test_s3_clients_are_not_imported_until_they_are_needed() -> None:
    program = (
        "import sys, orbax_ext; from orbax_ext import storage; orbax_ext.register(); "
        "sys.exit(bool({'obstore', 'boto3', 'botocore'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0


def test_a_missing_obstore_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    s3_lib.enable_s3("http://127.0.0.1:1")
    try:
        with pytest.raises(ImportError, match=r"pip install 'orbax-ext\[s3\]'"):
            epath.Path("s3://bucket/run").exists()
    finally:
        s3_lib.disable_s3()
