"""Object stores beyond gs:// in Orbax and etils: the places that know of schemes, and how to put them back."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from etils.epath import gpath
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.path import atomicity, atomicity_defaults
from orbax.checkpoint._src.serialization import ocdbt_utils, serialization, tensorstore_utils
from orbax.checkpoint.experimental.v1._src.loading import loading


def add_object_store(
    scheme: str,
    kvstore: Callable[[str, str], dict[str, Any]],
    files: Callable[[], Any],
    explain: Callable[[Exception, str], Exception],
    restoring: Callable[[str, bool], contextlib.AbstractContextManager[None]],
) -> Callable[[], None]:
    """Makes Orbax treat paths of one more scheme as it treats gs://; returns what undoes it.

    Three places know of schemes, in every supported release: `build_kvstore_tspec` (arrays), the defaults of
    `atomicity_defaults` (how a checkpoint becomes complete), and etils' choice of a backend (all other files).

    Args:
      scheme: Such as "s3".
      kvstore: Given bucket and path, TensorStore's spec for it.
      files: The etils backend for the scheme.
      explain: Given an error of TensorStore and a path, the error to raise instead.
      restoring: Entered around each restore, with the checkpoint's directory and whether all processes take part.
    """
    prefix = f"{scheme}://"
    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (tensorstore_utils, "build_kvstore_tspec", lambda found: _building_specs(found, prefix, kvstore)),
        (atomicity_defaults, "get_default_temporary_path_class", lambda found: _committing_by_file(found, prefix)),
        (atomicity_defaults, "get_item_default_temporary_path_class", lambda found: _committing_by_file(found, prefix)),
        (gpath._GPath, "_backend", lambda found: _choosing_backend(found, scheme, files)),
        *((owner, name, lambda found: _explaining(found, explain)) for owner, name in _array_operations()),
        *((owner, name, lambda found, read=read: _around(found, read, restoring)) for owner, name, read in _restores()),
    ]
    undo = []
    for owner, name, change in changes:
        found = owner.__dict__[name]
        changed = change(found)
        setattr(owner, name, changed)
        undo.append((owner, name, found, changed))

    def restore() -> None:
        for owner, name, found, changed in reversed(undo):
            if owner.__dict__[name] is changed:  # otherwise somebody has wrapped it in the meantime
                setattr(owner, name, found)

    return restore


def _building_specs(
    found: Callable[..., Any], prefix: str, kvstore: Callable[[str, str], dict[str, Any]]
) -> Callable[..., Any]:
    """Builds the spec as for gs://, with all that Orbax knows about object stores, and changes the store in it."""
    mark = prefix.rstrip("/") + "/"  # os.path.normpath makes s3:/ of s3://

    @functools.wraps(found)
    def build(directory: Any, *args: Any, **kwargs: Any) -> Any:
        text = os.fspath(directory)
        if not text.startswith(mark):
            return found(directory, *args, **kwargs)
        return _in_store(found(f"gs://{text[len(mark) :].lstrip('/')}", *args, **kwargs), kvstore)

    return build


def _in_store(spec: Any, kvstore: Callable[[str, str], dict[str, Any]]) -> Any:
    """The spec with every place on gs:// put into the store. Orbax wrote such a place as a URL until 0.12.0."""
    if isinstance(spec, str) and spec.startswith("gs://"):
        bucket, _, path = spec.removeprefix("gs://").partition("/")
        return kvstore(bucket, path)
    if isinstance(spec, dict) and spec.get("driver") in ("gcs", "gcs_grpc"):
        return kvstore(spec["bucket"], spec.get("path", ""))
    if isinstance(spec, dict):
        return {key: _in_store(value, kvstore) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_in_store(value, kvstore) for value in spec]
    return spec


def _committing_by_file(found: Callable[..., Any], prefix: str) -> Callable[..., Any]:
    @functools.wraps(found)
    def choose(path: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = found(path, *args, **kwargs)
        if not os.fspath(path).startswith(prefix) or chosen is atomicity.CommitFileTemporaryPath:
            return chosen
        options = kwargs.get("atomicity_options")  # from 0.12.4 on
        if options is not None and options.mode.name == "ATOMIC_RENAME":
            raise ValueError(
                f"{os.fspath(path)}: an object store has no atomic rename, so a checkpoint written half-way would pass "
                "for a complete one. Use AtomicityMode.AUTO or COMMIT_FILE."
            )
        return atomicity.CommitFileTemporaryPath

    return choose


def _choosing_backend(found: property, scheme: str, files: Callable[[], Any]) -> property:
    def choose(path: Any) -> Any:
        return files() if path._uri_scheme == scheme else found.__get__(path)

    return property(choose)


def _array_operations() -> list[tuple[Any, str]]:
    """What Orbax does with TensorStore, so that what it raises can be put into better words."""
    handlers = (type_handlers.ArrayHandler, type_handlers.NumpyHandler, type_handlers.StringHandler)
    names = ("deserialize", "metadata", "_background_serialize")
    operations: list[tuple[Any, str]] = [
        (handler, name) for handler in handlers for name in names if name in handler.__dict__
    ]
    operations += [(serialization, "async_serialize_from_host"), (ocdbt_utils, "merge_ocdbt_per_process_files")]
    return operations


def _restores() -> list[tuple[Any, str, Callable[..., tuple[str, bool]]]]:
    """Where every restore passes, and how to tell from the arguments where the checkpoint is and who takes part."""

    def of_manager(manager: Any, step: Any, *args: Any, directory: Any = None, **kwargs: Any) -> tuple[str, bool]:
        if step is None or manager._options.step_name_format is not None:
            return "", False  # the path is not known without asking the store; the checkpointer will know it
        directory = directory or (args[2] if len(args) > 2 else None) or manager.directory
        path = manager._get_save_directory(step, epath.Path(directory))
        return os.fspath(path), manager._multiprocessing_options.active_processes is None

    def of_checkpointer(checkpointer: Any, directory: Any, *args: Any, **kwargs: Any) -> tuple[str, bool]:
        return os.fspath(directory), checkpointer._active_processes is None

    def of_v1(path: Any, *args: Any, **kwargs: Any) -> tuple[str, bool]:
        options = loading.context_lib.get_context().multiprocessing_options
        return os.fspath(path), options.active_processes is None

    return [
        (ocp.CheckpointManager, "restore", of_manager),
        (ocp.Checkpointer, "restore", of_checkpointer),
        (loading, "_load_impl", of_v1),
    ]


def _around(
    found: Callable[..., Any],
    read: Callable[..., tuple[str, bool]],
    restoring: Callable[[str, bool], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    @functools.wraps(found)
    def restore(*args: Any, **kwargs: Any) -> Any:
        with restoring(*read(*args, **kwargs)):
            return found(*args, **kwargs)

    return restore


def _explaining(found: Callable[..., Any], explain: Callable[[Exception, str], Exception]) -> Callable[..., Any]:
    @functools.wraps(found)
    async def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return await found(*args, **kwargs)
        except Exception as error:
            better = explain(error, _place([*args, *kwargs.values()]))
            if better is error:
                raise
            raise better from None

    return explained


def _place(arguments: Sequence[Any]) -> str:
    """The path that a call is about: a directory, that of the first ParamInfo, or one in a spec."""
    for argument in arguments:
        if isinstance(argument, os.PathLike):
            return os.fspath(argument)
        if isinstance(argument, (list, tuple)) and argument and hasattr(argument[0], "parent_dir"):
            parent = argument[0].parent_dir
            return os.fspath(parent) if isinstance(parent, os.PathLike) else ""
        if isinstance(argument, dict) and "kvstore" in argument:
            return _url(argument["kvstore"])
    return ""


def _url(kvstore: Any) -> str:
    base = kvstore.get("base", kvstore) if isinstance(kvstore, dict) else {}
    base = base["layers"][0]["base"] if isinstance(base, dict) and base.get("driver") == "kvstack" else base
    if not isinstance(base, dict) or "driver" not in base:
        return ""
    return f"{base['driver']}://{base.get('bucket') or base.get('endpoint', '')}/{base.get('path', '')}"
