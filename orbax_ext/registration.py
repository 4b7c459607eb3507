"""Makes Orbax use our handler: for a whole process, for a block, or for one checkpointer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_utils, type_handlers

from orbax_ext import emergency, options
from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.placement import stacked_restore
from orbax_ext.storage import s3
from orbax_ext.upstream.array_handler import array_handler_parameters, array_handler_settings, uses_pathways
from orbax_ext.upstream.v1_contexts import hook_v1_array_handlers, v1_knobs


@dataclasses.dataclass(frozen=True)
class _Registration:
    """One call of `register`, and what undoes it."""

    knobs: dict[str, Any]
    previous_handler: type_handlers.TypeHandler
    enabled_s3: bool  # s3:// paths did not work before
    undo_emergency: Callable[[], None]


_registrations: list[_Registration] = []  # those in force, the latest last


def register(**knobs: Any) -> BroadcastArrayHandler:
    """Makes Orbax restore every `jax.Array` through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    Saving does not change: the new handler has the settings of the one that it replaces. Contexts of Orbax's v1 API
    also load through orbax_ext if they have `use_load_and_broadcast` set; for others see `orbax_ext.v1`. Paths that
    begin with s3:// work from here on, with the settings of the environment unless `storage.enable_s3` was called
    before.
    """
    previous = type_handlers.get_type_handler(jax.Array)
    handler = _replacement(previous, knobs)
    hook_v1_array_handlers(handler_for_v1)
    _registrations.append(
        _Registration(knobs, previous, not s3.s3_enabled(), undo_emergency=emergency.serve(lambda: handler))
    )
    if _registrations[-1].enabled_s3:
        s3.enable_s3()
    _set_array_handler(handler)
    return handler


def unregister() -> None:
    """Undoes the latest `register`: restores the handler that it replaced, and disables s3:// if it enabled that."""
    if not _registrations:
        raise ValueError("orbax_ext is not registered: there is nothing to undo.")
    _undo_registrations(len(_registrations) - 1)


@contextlib.contextmanager
def registered(**knobs: Any) -> Iterator[BroadcastArrayHandler]:
    """Calls `register` for a block, and afterwards undoes it and every `register` inside that is still in force."""
    depth, previous = len(_registrations), type_handlers.get_type_handler(jax.Array)
    try:
        yield register(**knobs)
    finally:
        _undo_registrations(depth)
        _set_array_handler(previous)


def _undo_registrations(depth: int) -> None:
    """Undoes all registrations after the first `depth`."""
    undone = _registrations[depth:]
    del _registrations[depth:]
    for registration in reversed(undone):
        registration.undo_emergency()
    if undone:
        _set_array_handler(undone[0].previous_handler)
    if any(registration.enabled_s3 for registration in undone):
        s3.disable_s3()


def pytree_handler(**knobs: Any) -> ocp.PyTreeCheckpointHandler:
    """Returns a `PyTreeCheckpointHandler` with its own registry, for `item_handlers=` and `Checkpointer`.

    Takes the knobs of `BroadcastArrayHandler` and those of `PyTreeCheckpointHandler`.
    """
    array_knobs, pytree_knobs = _split_knobs(knobs)
    handlers = {kind: type_handlers.get_type_handler(kind) for kind in type_handlers.supported_types()}
    handlers[jax.Array] = _replacement(handlers[jax.Array], array_knobs)
    registry = type_handlers.create_type_handler_registry(*handlers.items())
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **pytree_knobs)


def restore_args(abstract: Any, *, strict: bool = True, stacked: bool = False) -> Any:
    """Returns restore args with the shapes, dtypes and shardings of an abstract tree.

    They work with orbax_ext, plain Orbax and its stock single-replica handler. With `stacked`, which needs orbax_ext,
    leaves saved with pmap's leading device axis are restored without it, from the first row alone, and leaves saved
    without it are restored with it, wherever the abstract tree asks for the other form.
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


def _replacement(previous: type_handlers.TypeHandler, knobs: dict[str, Any]) -> BroadcastArrayHandler:
    """Returns our handler with these knobs; all other settings are those of the handler that it replaces."""
    settings = array_handler_settings(previous) if isinstance(previous, type_handlers.ArrayHandler) else {}
    if not settings:
        logging.warning("orbax_ext: replaces a %s, whose settings for saving it can't read", type(previous).__name__)
    if settings.get("array_metadata_store") is None:  # the stock single-replica handler's default, which can't save
        settings.pop("array_metadata_store", None)
    if type(previous) is type_handlers.SingleReplicaArrayHandler:
        settings.update(_single_replica_settings(previous))
        if knobs.get("replica_axis") is not None:
            del settings["replica_axis_index"]
    return BroadcastArrayHandler(**{**settings, **knobs})


def handler_for_v1(context: Any, stock: type_handlers.ArrayHandler) -> type_handlers.ArrayHandler:
    """Returns the handler for a v1 Context, given the one that Orbax made for it."""
    knobs = v1_knobs(context)
    if knobs is None and _registrations and isinstance(stock, type_handlers.SingleReplicaArrayHandler):
        knobs = _registrations[-1].knobs
    if knobs is None or uses_pathways(stock):
        return stock
    return _replacement(stock, knobs)


def _single_replica_settings(handler: type_handlers.SingleReplicaArrayHandler) -> dict[str, Any]:
    names = (
        "replica_axis_index",
        "primary_replica_id",
        "broadcast_memory_limit_bytes",
        "broadcast_memory_scaling_factor",
    )
    return {name: getattr(handler, name) for name in names}


def _split_knobs(knobs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the knobs of our handler, ArrayHandler's included, and all others."""
    known = {*options.FIELDS, *array_handler_parameters()}
    ours = {name: value for name, value in knobs.items() if name in known}
    return ours, {name: value for name, value in knobs.items() if name not in known}


def _set_array_handler(handler: type_handlers.TypeHandler) -> None:
    type_handlers.register_type_handler(jax.Array, handler, override=True)
