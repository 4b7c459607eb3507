"""The ways to put the handler where Orbax looks for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_utils, type_handlers

from orbax_ext import options
from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.placement import stacked_restore
from orbax_ext.storage import s3
from orbax_ext.upstream.array_handler import array_handler_parameters, array_handler_settings
from orbax_ext.upstream.v1_contexts import hook_v1_array_handlers, v1_knobs

# What each register() found, and the knobs it was given; the latest last.
_replaced: list[tuple[type_handlers.TypeHandler, dict[str, Any]]] = []
_enabled_s3: list[bool] = []  # whether each register() had to enable s3:// paths, the latest last


def register(**knobs: Any) -> BroadcastArrayHandler:
    """Makes Orbax restore every `jax.Array` through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    Saving goes on as before: the settings of the handler that was registered are taken over. Contexts of Orbax's v1
    API are served too if they have `use_load_and_broadcast` set; for others see `orbax_ext.v1`. Paths that begin with
    s3:// work from here on, with the settings of the environment unless `storage.enable_s3` was called before.
    """
    found = type_handlers.get_type_handler(jax.Array)
    handler = handler_like(found, knobs)
    hook_v1_array_handlers(handler_for_v1)
    _replaced.append((found, knobs))
    _enabled_s3.append(not s3.s3_enabled())
    if _enabled_s3[-1]:
        s3.enable_s3()
    _put(handler)
    return handler


def unregister() -> None:
    """Puts back the handler that the latest `register` replaced."""
    if not _replaced:
        raise ValueError("orbax_ext is not registered: there is nothing to put back.")
    found, _ = _replaced.pop()
    _put(found)
    if _enabled_s3.pop():
        s3.disable_s3()


@contextlib.contextmanager
def registered(**knobs: Any) -> Iterator[BroadcastArrayHandler]:
    """`register`, and whatever happens inside, the handler that was there before is there again afterwards."""
    depth, before = len(_replaced), type_handlers.get_type_handler(jax.Array)
    try:
        yield register(**knobs)
    finally:
        if any(_enabled_s3[depth:]):
            s3.disable_s3()
        del _replaced[depth:], _enabled_s3[depth:]
        _put(before)


def pytree_handler(**knobs: Any) -> ocp.PyTreeCheckpointHandler:
    """A `PyTreeCheckpointHandler` with a registry of its own, for `item_handlers=` and `Checkpointer`.

    Takes the knobs of `BroadcastArrayHandler`, and those of `PyTreeCheckpointHandler`.
    """
    found = type_handlers.get_type_handler(jax.Array)
    ours, theirs = _split(knobs)
    handlers = [(kind, type_handlers.get_type_handler(kind)) for kind in type_handlers.supported_types()]
    mended = [(kind, handler_like(found, ours) if kind is jax.Array else handler) for kind, handler in handlers]
    registry = type_handlers.create_type_handler_registry(*mended)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **theirs)


def restore_args(abstract: Any, *, strict: bool = True, stacked: bool = False) -> Any:
    """Restore args for an abstract tree: what it says of shapes, dtypes and shardings, leaf by leaf.

    They suit orbax_ext, plain Orbax and its stock single-replica handler alike. With `stacked`, which needs orbax_ext
    to restore, leaves saved with pmap's leading device axis come back without it, from the first row alone, and
    leaves saved without it come back with it, wherever the abstract tree asks for the other form.
    """
    if stacked:
        stacked_restore.require_shardings(abstract)
    return jax.tree.map(
        functools.partial(_single_replica_args, strict=strict, stacked=stacked),
        checkpoint_utils.construct_restore_args(abstract),
        abstract,
        is_leaf=lambda node: isinstance(node, type_handlers.RestoreArgs),
    )


def _single_replica_args(
    arg: type_handlers.RestoreArgs, leaf: Any, strict: bool, stacked: bool
) -> type_handlers.RestoreArgs:
    if not isinstance(arg, type_handlers.ArrayRestoreArgs):
        return arg
    fields = {**{field.name: getattr(arg, field.name) for field in dataclasses.fields(arg)}, "strict": strict}
    if stacked:
        return stacked_restore.StackedRestoreArgs(**fields, asked_shape=tuple(leaf.shape))
    return type_handlers.SingleReplicaArrayRestoreArgs(**fields)


def handler_like(found: type_handlers.TypeHandler, knobs: dict[str, Any]) -> BroadcastArrayHandler:
    """Our handler with the settings of the one that it replaces, where the knobs say nothing else."""
    settings = array_handler_settings(found) if isinstance(found, type_handlers.ArrayHandler) else {}
    if not settings:
        logging.warning("orbax_ext: replaces a %s, whose settings for saving it does not know", type(found).__name__)
    if settings.get("array_metadata_store") is None:  # the stock single-replica handler's default, which can't save
        settings.pop("array_metadata_store", None)
    if type(found) is type_handlers.SingleReplicaArrayHandler:
        settings.update(_single_replica_settings(found))
        if knobs.get("replica_axis") is not None:
            del settings["replica_axis_index"]
    return BroadcastArrayHandler(**{**settings, **knobs})


def handler_for_v1(context: Any, stock: type_handlers.ArrayHandler) -> type_handlers.ArrayHandler:
    """The handler that a v1 Context shall use, given the one that Orbax has made for it."""
    knobs = v1_knobs(context)
    if knobs is None and _replaced and isinstance(stock, type_handlers.SingleReplicaArrayHandler):
        _, knobs = _replaced[-1]
    if knobs is None or stock._dispatcher is not None:  # Pathways has a way of its own
        return stock
    return handler_like(stock, knobs)


def _single_replica_settings(found: type_handlers.SingleReplicaArrayHandler) -> dict[str, Any]:
    names = (
        "replica_axis_index",
        "primary_replica_id",
        "broadcast_memory_limit_bytes",
        "broadcast_memory_scaling_factor",
    )
    return {name: getattr(found, name) for name in names}


def _split(knobs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our knobs and ArrayHandler's, apart from all others."""
    known = {*options.FIELDS, *array_handler_parameters()}
    ours = {name: value for name, value in knobs.items() if name in known}
    return ours, {name: value for name, value in knobs.items() if name not in known}


def _put(handler: type_handlers.TypeHandler) -> None:
    type_handlers.register_type_handler(jax.Array, handler, override=True)
