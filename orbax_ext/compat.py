"""Every difference between releases of Orbax and JAX, and everything private of theirs that we touch.

No other module imports from `orbax.checkpoint._src`, `orbax.checkpoint.experimental.v1._src` or `jax._src`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from etils.epath import gpath
from jax._src import array as array_lib
from jax._src import core, distributed
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata as array_metadata_lib
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path import atomicity, atomicity_defaults
from orbax.checkpoint._src.serialization import (
    jax_array_restore_args,
    ocdbt_utils,
    serialization,
    tensorstore_utils,
)
from orbax.checkpoint.experimental.v1._src.context import context as v1_context
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler as v1_array_leaf_handler

ArrayMetadataStore = array_metadata_store.Store
Format = jax_array_restore_args.Format
ShardingMetadata = sharding_metadata.ShardingMetadata
sync_global_processes = multihost.sync_global_processes


def coordination_client() -> Any:
    """JAX's client of the coordination service, or None in a job of one process that never called initialize."""
    return distributed.global_state.client


def place_in_job() -> tuple[int, int]:
    """Index of this process and number of all as far as `jax.distributed` knows, also while it waits for the others."""
    state = distributed.global_state
    return state.process_id or 0, state.num_processes or 1


def sharding_from_text(text: str | None) -> Any:
    """The other end of `ShardingMetadata.to_serialized_string`; None for None."""
    return None if text is None else sharding_metadata.from_serialized_string(text)


def start_coordination_service(address: str, clients: int) -> Any:
    """A coordination service of its own, without devices; shut it down after its clients."""
    return _jax_extension().get_distributed_runtime_service(address, clients)


def join_coordination_service(address: str, number: int, seconds: int) -> Any:
    """A client of such a service; returns when it is connected."""
    client = _jax_extension().get_distributed_runtime_client(
        address, number, init_timeout=seconds, shutdown_on_destruction=False
    )
    client.connect()
    return client


def _jax_extension() -> Any:
    from jax._src.lib import _jax

    return _jax


def array_store(directory: Any, name: str | None, in_database: bool) -> Any:
    """TensorStore's spec for where an array of a checkpoint is stored, or all of them; a database is OCDBT."""
    return tensorstore_utils.build_kvstore_tspec(os.fspath(directory), name, use_ocdbt=in_database)


def array_context(in_database: bool) -> Any:
    """The TensorStore context that such specs need."""
    return tensorstore_utils.get_ts_context(use_ocdbt=in_database)


def array_handler_parameters() -> tuple[str, ...]:
    """The names of ArrayHandler's keyword arguments in this release."""
    return tuple(inspect.signature(type_handlers.ArrayHandler).parameters)


def array_handler_settings(handler: type_handlers.ArrayHandler) -> dict[str, Any]:
    """The keyword arguments that would make an ArrayHandler with the same settings as this one.

    ArrayHandler keeps each argument in an attribute of the same name with an underscore, in every supported release.
    """
    return {name: getattr(handler, f"_{name}") for name in array_handler_parameters() if hasattr(handler, f"_{name}")}


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """What the checkpoint's own list of arrays says of one of them."""

    chunk: tuple[int, ...]
    key_impl: str  # of a typed PRNG key; empty for all else


async def saved_arrays(handler: type_handlers.ArrayHandler, checkpoint_dir: Any) -> dict[str, SavedArray]:
    """The list of arrays that Orbax keeps in a checkpoint, by leaf name; empty if it has none."""
    store = handler._array_metadata_store
    if store is None:
        return {}
    # Every process that saved has left one, all with the same arrays: there may be thousands, and one is enough.
    listed = await store.read(checkpoint_dir=checkpoint_dir, process_index=0)
    if listed is None:
        by_process = await store.read(checkpoint_dir=checkpoint_dir) or {}
        listed = next(iter(by_process.values()), [])
    found = {}
    for metadata in listed:
        impl = (metadata.ext_metadata or {}).get(array_metadata_lib.RANDOM_KEY_IMPL, "")
        found[metadata.param_name] = SavedArray(tuple(metadata.chunk_shape), impl)
    return found


def without_array_metadata(handler: type_handlers.ArrayHandler) -> type_handlers.ArrayHandler:
    """The same handler, which reads arrays without the checkpoint's own list of them.

    `ArrayHandler.deserialize` reads the lists of all processes that saved, each time it is called. They tell it which
    arrays are typed PRNG keys.
    """
    reader = copy.copy(handler)
    reader._array_metadata_store = None
    return reader


async def read_view(
    handler: type_handlers.ArrayHandler,
    info: Any,
    arg: Any,
    sharding: Any,
    *,
    stored_shape: Sequence[int],
    transform: dict[str, Any],
    shape: Sequence[int],
) -> jax.Array:
    """What `ArrayHandler.deserialize` does for one array, for a view of it: TensorStore's JSON index transform.

    Fails if the array is not stored in the given shape: Orbax would tell only for an array read whole.
    """
    found = tensorstore_utils.build_array_read_spec(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        metadata_key=handler._metadata_key,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
        target_dtype=arg.dtype,
    )
    spec = copy.deepcopy(found.json)
    stored = spec
    while "base" in stored:
        stored = stored["base"]
    stored.setdefault("metadata", {})["shape"] = list(stored_shape)
    array, _ = await serialization.async_deserialize(
        sharding,
        {**spec, "transform": transform},
        global_shape=tuple(shape),
        dtype=arg.dtype,
        byte_limiter=info.byte_limiter,
        context=info.ts_context,
    )
    return array


_V1_KNOBS = "_orbax_ext_knobs"
_v1_array_handler = v1_array_leaf_handler._create_v0_array_handler


def hook_v1_array_handlers(choose: Callable[[Any, type_handlers.ArrayHandler], type_handlers.ArrayHandler]) -> None:
    """Lets `choose(context, stock handler)` have the last word on the array handler of every v1 Context.

    v1 asks a function of this name for it in every supported release. Setting it again changes nothing.
    """

    def create(context: Any) -> type_handlers.ArrayHandler:
        return choose(context, _v1_array_handler(context))

    v1_array_leaf_handler._create_v0_array_handler = create


def v1_context_with(base: Any, knobs: dict[str, Any]) -> Any:
    """A v1 Context with the options of `base`, or of the active one, that carries our knobs.

    They are an attribute of its options for loading arrays: these are what a Context made from this one inherits.
    """
    derived = v1_context.Context(base if base is not None else v1_context.get_context())
    array_options = copy.copy(derived.array_options)
    loading = copy.copy(array_options.loading)
    # Options are frozen dataclasses before 0.12.0 and refuse changes while their Context is active since.
    object.__setattr__(loading, _V1_KNOBS, dict(knobs))
    object.__setattr__(array_options, "loading", loading)
    derived._array_options = array_options
    return derived


def v1_knobs(context: Any) -> dict[str, Any] | None:
    """The knobs that a v1 Context carries, or None if it is not one of ours."""
    return getattr(context.array_options.loading, _V1_KNOBS, None)


def join_arrays(
    shape: tuple[int, ...], dtype: Any, sharding: Any, arrays: Any, *, weak_type: bool = False
) -> jax.Array:
    """A global array of these single-device arrays, one for each of this process's devices. Nothing is copied.

    The public function forgets that a dtype is weak, in every supported release; device_put does not.
    """
    joined = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    if not weak_type:
        return joined
    aval = joined.aval.update(weak_type=True)
    return array_lib.ArrayImpl(aval, sharding, list(arrays), committed=True)


def is_jax_dtype(dtype: Any) -> bool:
    """Whether JAX has arrays of this dtype; not of strings, objects or dates."""
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.bool_, np.number))


def tracing() -> bool:
    """Whether a function is being traced, as inside jit."""
    return not core.trace_state_clean()


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
    from orbax.checkpoint.experimental.v1._src.loading import loading

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


class LonelyClient:
    """Stands in for the coordination service's client in a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._values[key] = value

    def key_value_try_get(self, key: str) -> str:
        if key not in self._values:
            raise KeyError(f"NOT_FOUND: {key}")
        return self._values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self._values.items() if name.startswith(key)]

    def key_value_delete(self, key: str) -> None:
        self._values = {name: value for name, value in self._values.items() if not f"{name}/".startswith(f"{key}/")}

    def key_value_increment(self, key: str, increment: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + increment)
        return int(self._values[key])

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        return self._values[key]
