"""The same restore for those who read with TensorStore themselves: specs and shardings in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import jax
import tensorstore as ts
from jax.sharding import Sharding
from orbax.checkpoint import type_handlers

from orbax_ext import options
from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.options import Knobs
from orbax_ext.upstream.array_handler import array_context
from orbax_ext.upstream.emergency import run_sync
from orbax_ext.upstream.stored_arrays import StoredSpec

_OPEN_MODE = ("open", "create", "delete_existing", "assume_metadata", "assume_cached_metadata")


@options.with_knobs_in_signature
def read_arrays(specs: Any, shardings: Any, dtypes: Any = None, **knobs: Unpack[Knobs]) -> Any:
    """Reads stored arrays onto devices, each byte once, as `BroadcastArrayHandler` restores the leaves of a checkpoint.

    All processes of the job must call it, with the same specs.

    Args:
      specs: A TensorStore spec for each array, as JSON or as a `tensorstore.Spec`: a tree of them, or a list. They are
        opened and never created.
      shardings: A `jax.sharding.Sharding` for each array, in a tree of the same structure.
      dtypes: A dtype for each array, in a tree of the same structure, or None where it stays as it is stored.
      **knobs: Those of `register`. `verify` compares the replicas with each other.

    Returns:
      The arrays, in a tree of the same structure.

    Raises:
      ValueError: The arguments do not fit together.
      RestoreError: On all processes, if one could not read; see `orbax_ext.errors`.
    """
    options.require_known(knobs)
    paths, structure = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=lambda node: node is None)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "array" for path, _ in paths]
    asked = [sharding for _, sharding in paths]
    for name, sharding in zip(names, asked, strict=True):
        if not isinstance(sharding, Sharding):
            raise ValueError(f"read_arrays: {name}: expected a jax.sharding.Sharding, found {sharding!r}.")
    casts = [None] * len(names) if dtypes is None else _like(structure, dtypes, "dtypes")
    context = array_context(in_database=True)
    infos = [
        _stored_spec(name, spec, context) for name, spec in zip(names, _like(structure, specs, "specs"), strict=True)
    ]
    if not infos:
        return structure.unflatten([])
    args = [
        type_handlers.ArrayRestoreArgs(sharding=sharding, dtype=dtype)
        for sharding, dtype in zip(asked, casts, strict=True)
    ]
    handler = BroadcastArrayHandler(array_metadata_store=None, **knobs)
    return structure.unflatten(run_sync(handler.deserialize(infos, args)))


def _like(structure: Any, tree: Any, name: str) -> list[Any]:
    """Returns what a tree has where another one has its leaves."""
    try:
        leaves: list[Any] = structure.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"read_arrays: {name} must have the structure of shardings: {error}") from None
    return leaves


def _stored_spec(name: str, spec: Any, context: ts.Context) -> StoredSpec:
    try:
        parsed = spec if isinstance(spec, ts.Spec) else ts.Spec(dict(spec))
    except (TypeError, ValueError) as error:
        raise ValueError(f"read_arrays: {name}: expected a TensorStore spec, found {spec!r}: {error}") from None
    content: Mapping[str, Any] = parsed.to_json()
    content = {key: value for key, value in content.items() if key not in _OPEN_MODE}
    innermost = content
    while "base" in innermost:  # an array may be a view of another one
        innermost = innermost["base"]
    return StoredSpec(name, content, context, _place(innermost.get("kvstore", "")))


def _place(kvstore: Any) -> str:
    """Returns where a key-value store is, for messages. TensorStore has no URL for S3 with an endpoint."""
    if isinstance(kvstore, str):
        return kvstore
    if "base" in kvstore:
        return _place(kvstore["base"])
    schemes = {"s3": "s3", "gcs": "gs"}
    scheme = schemes.get(kvstore.get("driver", ""))
    return f"{scheme}://{kvstore['bucket']}/{kvstore.get('path', '')}" if scheme else str(kvstore.get("path", ""))
