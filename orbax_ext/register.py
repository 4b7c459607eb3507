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

from orbax_ext import compat, options
from orbax_ext.handler import BroadcastArrayHandler

_replaced: list[type_handlers.TypeHandler] = []  # what each register() found, the latest last


def register(**knobs: Any) -> BroadcastArrayHandler:
    """Makes Orbax restore every `jax.Array` through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    Saving goes on as before: the settings of the handler that was registered are taken over.
    """
    found = type_handlers.get_type_handler(jax.Array)
    handler = _handler_like(found, knobs)
    _replaced.append(found)
    _put(handler)
    return handler


def unregister() -> None:
    """Puts back the handler that the latest `register` replaced."""
    if not _replaced:
        raise ValueError("orbax_ext is not registered: there is nothing to put back.")
    _put(_replaced.pop())


@contextlib.contextmanager
def registered(**knobs: Any) -> Iterator[BroadcastArrayHandler]:
    """`register`, and whatever happens inside, the handler that was there before is there again afterwards."""
    depth, before = len(_replaced), type_handlers.get_type_handler(jax.Array)
    try:
        yield register(**knobs)
    finally:
        del _replaced[depth:]
        _put(before)


def pytree_handler(**knobs: Any) -> ocp.PyTreeCheckpointHandler:
    """A `PyTreeCheckpointHandler` with a registry of its own, for `item_handlers=` and `Checkpointer`.

    Takes the knobs of `BroadcastArrayHandler`, and those of `PyTreeCheckpointHandler`.
    """
    found = type_handlers.get_type_handler(jax.Array)
    ours, theirs = _split(knobs)
    handlers = [(kind, type_handlers.get_type_handler(kind)) for kind in type_handlers.supported_types()]
    mended = [(kind, _handler_like(found, ours) if kind is jax.Array else handler) for kind, handler in handlers]
    registry = type_handlers.create_type_handler_registry(*mended)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **theirs)


def restore_args(abstract: Any, *, strict: bool = True) -> Any:
    """Restore args for an abstract tree: what it says of shapes, dtypes and shardings, leaf by leaf.

    They suit orbax_ext, plain Orbax and its stock single-replica handler alike.
    """
    return jax.tree.map(
        functools.partial(_single_replica_args, strict=strict),
        checkpoint_utils.construct_restore_args(abstract),
        is_leaf=lambda node: isinstance(node, type_handlers.RestoreArgs),
    )


def _single_replica_args(arg: type_handlers.RestoreArgs, strict: bool) -> type_handlers.RestoreArgs:
    if not isinstance(arg, type_handlers.ArrayRestoreArgs):
        return arg
    return type_handlers.SingleReplicaArrayRestoreArgs(
        **{**{field.name: getattr(arg, field.name) for field in dataclasses.fields(arg)}, "strict": strict}
    )


def _handler_like(found: type_handlers.TypeHandler, knobs: dict[str, Any]) -> BroadcastArrayHandler:
    settings = compat.array_handler_settings(found) if isinstance(found, type_handlers.ArrayHandler) else {}
    if not settings:
        logging.warning("orbax_ext: replaces a %s, whose settings for saving it does not know", type(found).__name__)
    if settings.get("array_metadata_store") is None:  # the stock single-replica handler's default, which can't save
        settings.pop("array_metadata_store", None)
    return BroadcastArrayHandler(**{**settings, **knobs})


def _split(knobs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our knobs and ArrayHandler's, apart from all others."""
    known = {*options.FIELDS, *compat.array_handler_parameters()}
    ours = {name: value for name, value in knobs.items() if name in known}
    return ours, {name: value for name, value in knobs.items() if name not in known}


def _put(handler: type_handlers.TypeHandler) -> None:
    type_handlers.register_type_handler(jax.Array, handler, override=True)
