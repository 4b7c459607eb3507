"""Makes Orbax and etils treat one more URL scheme as they treat gs://, and undoes it.

`HOOKS` lists every function that is replaced, and why. All of them exist in every supported release.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from orbax_ext.upstream.hooks import Hook, install


@dataclasses.dataclass(frozen=True)
class UrlScheme:
    """An object store that paths of one URL scheme name."""

    name: str  # such as "s3"
    kvstore: Callable[[str, str], dict[str, Any]]  # TensorStore's spec of a bucket and a path
    files: Callable[[], Any]  # the etils backend
    explain: Callable[[Exception, str], Exception]  # given TensorStore's error and a path, the error to raise instead
    # Entered around each restore, with the checkpoint's directory and whether all processes take part.
    restoring: Callable[[str, bool], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class _Addition:
    """An object store that is added when the first path of its scheme is seen."""

    scheme: str
    add: Callable[[], bool]


def add_object_store(scheme: UrlScheme) -> Callable[[], None]:
    """Makes Orbax take paths of the scheme; returns a function that undoes it."""
    return install(HOOKS, scheme)


def on_first_path(scheme: str, add: Callable[[], bool]) -> Callable[[], None]:
    """Calls `add` when a path of the scheme is used; returns a function that undoes this.

    `add` adds the object store, unless it has been added since, and returns whether it did. It must not have been
    added before.
    """
    return install(FIRST_PATH_HOOKS, _Addition(scheme, add))


def _build_spec(original: Callable[..., Any], scheme: UrlScheme) -> Callable[..., Any]:
    """Builds the spec as for gs://, with all that Orbax sets for object stores, then replaces the store in it."""
    prefix = f"{scheme.name}:/"  # os.path.normpath turns s3:// into s3:/

    @functools.wraps(original)
    def build(directory: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.fspath(directory)
        if not path.startswith(prefix):
            return original(directory, *args, **kwargs)
        return _in_store(original(f"gs://{path[len(prefix) :].lstrip('/')}", *args, **kwargs), scheme)

    return build


def _in_store(spec: Any, scheme: UrlScheme) -> Any:
    """Returns the spec with every place on gs:// moved to the store. Before 0.12.0 such a place is a URL."""
    if isinstance(spec, str) and spec.startswith("gs://"):
        bucket, _, path = spec.removeprefix("gs://").partition("/")
        return scheme.kvstore(bucket, path)
    if isinstance(spec, dict) and spec.get("driver") in ("gcs", "gcs_grpc"):
        return scheme.kvstore(spec["bucket"], spec.get("path", ""))
    if isinstance(spec, dict):
        return {key: _in_store(value, scheme) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_in_store(value, scheme) for value in spec]
    return spec


def _commit_by_file(original: Callable[..., Any], scheme: UrlScheme) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(path: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = original(path, *args, **kwargs)
        if not os.fspath(path).startswith(f"{scheme.name}://") or chosen is atomicity.CommitFileTemporaryPath:
            return chosen
        options = kwargs.get("atomicity_options")  # from 0.12.4 on
        if options is not None and options.mode.name == "ATOMIC_RENAME":
            raise ValueError(
                f"{os.fspath(path)}: an object store has no atomic rename, so a half-written checkpoint would look "
                "complete. Use AtomicityMode.AUTO or COMMIT_FILE."
            )
        return atomicity.CommitFileTemporaryPath

    return choose


def _choose_backend(original: property, scheme: UrlScheme) -> property:
    return property(lambda path: scheme.files() if path._uri_scheme == scheme.name else original.__get__(path))


def _see_path(original: property, addition: _Addition) -> property:
    def backend(path: Any) -> Any:
        if path._uri_scheme != addition.scheme:
            return original.__get__(path)
        addition.add()
        return path._backend  # the store's, whose hook was installed after this one

    return property(backend)


def _see_restore(
    directory_and_all: Callable[..., tuple[str, bool]], restore_again: Callable[..., Any]
) -> Callable[[Callable[..., Any], _Addition], Callable[..., Any]]:
    def wrap(original: Callable[..., Any], addition: _Addition) -> Callable[..., Any]:
        @functools.wraps(original)
        def restore(*args: Any, **kwargs: Any) -> Any:
            directory, _ = directory_and_all(*args, **kwargs)
            if directory.startswith(f"{addition.scheme}://") and addition.add():
                return restore_again(*args, **kwargs)  # now inside of the store's own hook
            return original(*args, **kwargs)

        return restore

    return wrap


def _explain_errors(original: Callable[..., Any], scheme: UrlScheme) -> Callable[..., Any]:
    @functools.wraps(original)
    async def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return await original(*args, **kwargs)
        except Exception as error:
            better = scheme.explain(error, _path_in([*args, *kwargs.values()]))
            if better is error:
                raise
            raise better from None

    return explained


def _path_in(arguments: Sequence[Any]) -> str:
    """Returns the path that a call is about: a directory, that of the first ParamInfo, or one in a spec."""
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


def _around_restore(
    directory_and_all: Callable[..., tuple[str, bool]],
) -> Callable[[Callable[..., Any], UrlScheme], Callable[..., Any]]:
    """Returns a replacement for a restore that runs inside `scheme.restoring`.

    `directory_and_all` takes the arguments of the restore and returns those of `restoring`.
    """

    def wrap(original: Callable[..., Any], scheme: UrlScheme) -> Callable[..., Any]:
        @functools.wraps(original)
        def restore(*args: Any, **kwargs: Any) -> Any:
            with scheme.restoring(*directory_and_all(*args, **kwargs)):
                return original(*args, **kwargs)

        return restore

    return wrap


def _of_manager(manager: Any, step: Any, *args: Any, directory: Any = None, **kwargs: Any) -> tuple[str, bool]:
    if step is None or manager._options.step_name_format is not None:
        return "", False  # the path is not known yet; the manager passes it to the checkpointer's restore
    directory = directory or (args[2] if len(args) > 2 else None) or manager.directory
    path = manager._get_save_directory(step, epath.Path(directory))
    return os.fspath(path), manager._multiprocessing_options.active_processes is None


def _of_checkpointer(checkpointer: Any, directory: Any, *args: Any, **kwargs: Any) -> tuple[str, bool]:
    return os.fspath(directory), checkpointer._active_processes is None


def _of_v1(path: Any, *args: Any, **kwargs: Any) -> tuple[str, bool]:
    options = loading.context_lib.get_context().multiprocessing_options
    return os.fspath(path), options.active_processes is None


_FIRST = "sees the first path of an object store, and only then installs the hooks for it"
_LEAF_HANDLERS = (type_handlers.ArrayHandler, type_handlers.NumpyHandler, type_handlers.StringHandler)
_LEAF_OPERATIONS = ("deserialize", "metadata", "_background_serialize")
_ERRORS = "passes on errors of TensorStore, which do not say what to do"
_SHARING = "a restore, during which processes share the metadata that they read"

HOOKS = (
    Hook(tensorstore_utils, "build_kvstore_tspec", "where TensorStore finds arrays", _build_spec),
    Hook(
        atomicity_defaults,
        "get_default_temporary_path_class",
        "how a checkpoint becomes complete: by rename, which object stores do not have",
        _commit_by_file,
    ),
    Hook(
        atomicity_defaults,
        "get_item_default_temporary_path_class",
        "the same for one item of a checkpoint",
        _commit_by_file,
    ),
    Hook(gpath._GPath, "_backend", "how etils reads and writes all other files", _choose_backend),
    *(
        Hook(handler, name, _ERRORS, _explain_errors)
        for handler in _LEAF_HANDLERS
        for name in _LEAF_OPERATIONS
        if name in handler.__dict__
    ),
    Hook(serialization, "async_serialize_from_host", _ERRORS, _explain_errors),
    Hook(ocdbt_utils, "merge_ocdbt_per_process_files", _ERRORS, _explain_errors),
    Hook(ocp.CheckpointManager, "restore", _SHARING, _around_restore(_of_manager)),
    Hook(ocp.Checkpointer, "restore", _SHARING, _around_restore(_of_checkpointer)),
    Hook(loading, "_load_impl", _SHARING, _around_restore(_of_v1)),
)

# A manager looks at its directory when it is made; these look at theirs when they have already begun.
_SEE_CHECKPOINTER = _see_restore(_of_checkpointer, lambda *args, **kwargs: ocp.Checkpointer.restore(*args, **kwargs))
_SEE_V1 = _see_restore(_of_v1, lambda *args, **kwargs: loading._load_impl(*args, **kwargs))
FIRST_PATH_HOOKS = (
    Hook(gpath._GPath, "_backend", _FIRST, _see_path),
    Hook(ocp.Checkpointer, "restore", _FIRST, _SEE_CHECKPOINTER),
    Hook(loading, "_load_impl", _FIRST, _SEE_V1),
)
