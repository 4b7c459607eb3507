"""The hooks for a new URL scheme; S3 itself is tested in tests/storage."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from typing import Any

import pytest
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import tensorstore_utils

from orbax_ext.upstream import object_stores
from orbax_ext.upstream.object_stores import HOOKS, UrlScheme, add_object_store

SCHEME = UrlScheme(
    "toy",
    kvstore=lambda bucket, path: {"driver": "toy", "bucket": bucket, "path": path},
    files=lambda: None,
    explain=lambda error, path: OSError(f"{path}: {error}"),
    restoring=lambda directory, together: contextlib.nullcontext(),
)


def hooked() -> list[Any]:
    return [hook.owner.__dict__[hook.name] for hook in HOOKS]


def test_every_hook_is_named_once_with_a_reason() -> None:
    assert len({(hook.owner, hook.name) for hook in HOOKS}) == len(HOOKS)
    assert all(hook.why for hook in HOOKS)


def test_undoing_restores_all_functions() -> None:
    before = hooked()
    undo = add_object_store(SCHEME)
    assert all(new is not old for new, old in zip(hooked(), before, strict=True))
    undo()
    assert all(new is old for new, old in zip(hooked(), before, strict=True))


def test_undoing_keeps_functions_that_other_code_has_replaced_since(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooked()
    undo = add_object_store(SCHEME)
    other = lambda *args, **kwargs: None  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(type_handlers.ArrayHandler, "metadata", other)
        undo()
        assert type_handlers.ArrayHandler.metadata is other
    undo()  # now the replacement is back in its place
    assert all(new is old for new, old in zip(hooked(), before, strict=True))


@pytest.mark.parametrize("in_database", [False, True])
@pytest.mark.parametrize("address", ["toy://bucket/some/path", "toy:/bucket/some/path"])
def test_specs_of_the_scheme_use_its_store_and_others_do_not(
    address: str, in_database: bool, tmp_path: pathlib.Path
) -> None:
    plain = tensorstore_utils.build_kvstore_tspec(str(tmp_path), "leaf", use_ocdbt=in_database)
    undo = add_object_store(SCHEME)
    try:
        spec = tensorstore_utils.build_kvstore_tspec(address, "leaf", use_ocdbt=in_database)
        assert tensorstore_utils.build_kvstore_tspec(str(tmp_path), "leaf", use_ocdbt=in_database) == plain
    finally:
        undo()
    store = spec["base"] if in_database else spec
    assert (store["driver"], store["bucket"]) == ("toy", "bucket")
    assert store["path"].startswith("some/path")


def test_errors_are_explained_with_the_path_of_the_call() -> None:
    async def failing(*args: Any) -> None:
        raise ValueError("no")

    explained = object_stores._explain_errors(failing, SCHEME)
    with pytest.raises(OSError, match="/some/place: no"):
        asyncio.run(explained(pathlib.Path("/some/place")))
    with pytest.raises(OSError, match="toy://bucket/a: no"):
        asyncio.run(
            explained({"kvstore": {"driver": "ocdbt", "base": {"driver": "toy", "bucket": "bucket", "path": "a"}}})
        )
