"""Makes Orbax use our handler: for a whole process, for a block, or for one checkpointer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_utils, type_handlers

from orbax_ext import emergency, options
from orbax_ext.handler import BroadcastArrayHandler, HandlerKnobs
from orbax_ext.meeting.listing import from_process_0
from orbax_ext.placement import stacked_restore
from orbax_ext.storage import s3
from orbax_ext.transfer.release import ReleasingRestoreArgs, require_arrays
from orbax_ext.upstream import steps, stock_handlers
from orbax_ext.upstream.array_handler import (
    PyTreeHandlerArguments,
    array_handler_parameters,
    array_handler_settings,
    lend_array_metadata_store,
    pytree_handler_parameters,
    set_array_handler,
    uses_pathways,
)
from orbax_ext.upstream.hooks import Hook, install
from orbax_ext.upstream.object_stores import FIRST_PATH_HOOKS
from orbax_ext.upstream.v1_contexts import v1_knobs


class PyTreeKnobs(HandlerKnobs, PyTreeHandlerArguments, total=False):
    """The knobs of `BroadcastArrayHandler`, and the arguments of `PyTreeCheckpointHandler`."""


@dataclasses.dataclass(eq=False)
class _Registration:
    """One call of `register` or `kept_registered`, and what undoes it."""

    knobs: dict[str, Any]
    handler: BroadcastArrayHandler
    previous: type_handlers.TypeHandler  # to put back
    undo: contextlib.ExitStack
    owner: int | None  # the thread that called `register`


_registrations: list[_Registration] = []  # those in force, the latest last
_lock = threading.RLock()


@options.with_knobs_in_signature
def register(**knobs: Unpack[HandlerKnobs]) -> BroadcastArrayHandler:
    """Makes Orbax restore every `jax.Array` through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    Orbax's own single-replica handlers are served too, whoever makes them, in whichever registry or v1 Context: their
    settings count where no knob is given here. For other v1 Contexts see `orbax_ext.v1`. Saving does not change: the
    new handler has the settings of the one that it replaces. Paths that begin with s3:// work from here on, with the
    settings of the environment unless `storage.enable_s3` was called before.
    """
    with _lock, contextlib.ExitStack() as undo:
        handler = _replacement(type_handlers.get_type_handler(jax.Array), dict(knobs))
        undo.callback(install(stock_handlers.HOOKS, _handler_for_stock))
        undo.callback(emergency.serve(lambda: handler))
        undo.callback(install(steps.HOOKS, functools.partial(from_process_0, limits=handler.limits)))
        undo.enter_context(s3.waiting_within(handler.limits))
        undo.callback(s3.enable_s3_on_first_path())
        _add(dict(knobs), handler, undo.pop_all(), threading.get_ident())
    return handler


def unregister() -> None:
    """Undoes the latest `register`: restores the handler that it replaced and all functions that it hooked."""
    registrations = [one for one in _registrations if one.owner is not None]
    if not registrations:
        raise ValueError("orbax_ext is not registered: there is nothing to undo.")
    _undo(registrations[-1])


@options.with_knobs_in_signature
@contextlib.contextmanager
def registered(**knobs: Unpack[HandlerKnobs]) -> Iterator[BroadcastArrayHandler]:
    """Calls `register` for a block, and afterwards undoes it and every `register` inside that is still in force."""
    before = [*_registrations]
    try:
        yield register(**knobs)
    finally:
        mine = [one for one in _registrations if one not in before and one.owner == threading.get_ident()]
        for registration in reversed(mine):
            _undo(registration)


@contextlib.contextmanager
def kept_registered() -> Iterator[None]:
    """Keeps orbax_ext registered for a block as it is now, or with its defaults if it is not.

    Whatever is registered and undone meanwhile makes no difference to what restores in the block, and the block none to
    what is registered after it. It may end in another thread.
    """
    with _lock, contextlib.ExitStack() as undo:
        current = type_handlers.get_type_handler(jax.Array)
        handler = serving_handler(current) or handler_in_place_of(current)
        knobs = _registrations[-1].knobs if _registrations else {}
        undo.callback(install(stock_handlers.HOOKS, _handler_for_stock))
        undo.enter_context(s3.waiting_within(handler.limits))
        registration = _add(knobs, handler, undo.pop_all(), None)
    try:
        yield
    finally:
        _undo(registration)


def hooks() -> tuple[Hook, ...]:
    """Returns the hooks that `register` installs."""
    return (*stock_handlers.HOOKS, *emergency.HOOKS, *steps.HOOKS, *FIRST_PATH_HOOKS)


def stock_handler_is_unserved() -> bool:
    """Returns whether Orbax's own single-replica handler is registered, and orbax_ext is not."""
    handler = type_handlers.get_type_handler(jax.Array)
    stock = isinstance(handler, type_handlers.SingleReplicaArrayHandler)
    return stock and not isinstance(handler, BroadcastArrayHandler) and not _registrations


def _add(
    knobs: dict[str, Any], handler: BroadcastArrayHandler, undo: contextlib.ExitStack, owner: int | None
) -> _Registration:
    registration = _Registration(knobs, handler, type_handlers.get_type_handler(jax.Array), undo, owner)
    set_array_handler(handler)
    _registrations.append(registration)
    return registration


def _undo(registration: _Registration) -> None:
    """Undoes a registration, also if it is not the latest: then that one will put back what this one has replaced."""
    with _lock:
        position = _registrations.index(registration)
        del _registrations[position]
        if position < len(_registrations):
            _registrations[position].previous = registration.previous
        elif registration.owner is not None or type_handlers.get_type_handler(jax.Array) is registration.handler:
            set_array_handler(registration.previous)
        registration.undo.close()


def _handler_for_stock(stock: type_handlers.ArrayHandler) -> BroadcastArrayHandler | None:
    """Returns the handler that restores in place of a stock single-replica handler; None to let that one restore."""
    if not _registrations or isinstance(stock, BroadcastArrayHandler) or uses_pathways(stock):
        return None
    # One that is only kept ends with a restore: the handler has to save after that.
    registration = next((one for one in reversed(_registrations) if one.owner is not None), _registrations[-1])
    if type_handlers.get_type_handler(jax.Array) is stock:
        # Whoever registered it saves with it from here on. A private registry saves with what its owner gave it.
        registration.undo.callback(lend_array_metadata_store(stock, registration.handler))
    return _replacement(stock, registration.knobs)


def serving_handler(handler: type_handlers.TypeHandler) -> BroadcastArrayHandler | None:
    """Returns the handler of orbax_ext that restores if this one is registered; None if that is Orbax's own."""
    if isinstance(handler, BroadcastArrayHandler):
        return handler
    return _handler_for_stock(handler) if isinstance(handler, type_handlers.SingleReplicaArrayHandler) else None


def handler_in_place_of(handler: type_handlers.TypeHandler) -> BroadcastArrayHandler:
    """Returns the handler that `register()` would make where this one is registered."""
    return _replacement(handler, {})


@options.with_knobs_in_signature
def pytree_handler(**knobs: Unpack[PyTreeKnobs]) -> ocp.PyTreeCheckpointHandler:
    """Returns a `PyTreeCheckpointHandler` with its own registry, for `item_handlers=` and `Checkpointer`.

    Takes the knobs of `BroadcastArrayHandler` and those of `PyTreeCheckpointHandler`.
    """
    array_knobs, pytree_knobs = _split_knobs(dict(knobs))
    handlers = {kind: type_handlers.get_type_handler(kind) for kind in type_handlers.supported_types()}
    handlers[jax.Array] = _replacement(handlers[jax.Array], array_knobs)
    registry = type_handlers.create_type_handler_registry(*handlers.items())
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **pytree_knobs)


def restore_args(abstract: Any, *, strict: bool = True, stacked: bool = False, release: bool = False) -> Any:
    """Returns restore args with the shapes, dtypes and shardings of an abstract tree.

    They work with orbax_ext, plain Orbax and its stock single-replica handler. With `stacked`, which needs orbax_ext,
    leaves saved with pmap's leading device axis are restored without it, from the first row alone, and leaves saved
    without it are restored with it, wherever the abstract tree asks for the other form.

    With `release`, which needs orbax_ext, the first argument is the state that the restore replaces. Its arrays are
    deleted leaf by leaf just before the new ones are placed, so that both are never in memory as a whole. They can't be
    used afterwards, nor can other arrays that share their buffers; if the restore fails, its error says so.
    """
    if stacked:
        stacked_restore.require_shardings(abstract)
    if release:
        if stacked:
            raise ValueError("restore_args: expected stacked or release, found both. Restore without release.")
        require_arrays(abstract)
    return jax.tree.map(
        functools.partial(_single_replica_args, strict=strict, stacked=stacked, release=release),
        checkpoint_utils.construct_restore_args(abstract),
        abstract,
        is_leaf=lambda node: isinstance(node, type_handlers.RestoreArgs),
    )


def _single_replica_args(
    arg: type_handlers.RestoreArgs, leaf: Any, strict: bool, stacked: bool, release: bool
) -> type_handlers.RestoreArgs:
    if not isinstance(arg, type_handlers.ArrayRestoreArgs):
        return arg
    fields = {**{field.name: getattr(arg, field.name) for field in dataclasses.fields(arg)}, "strict": strict}
    if stacked:
        return stacked_restore.StackedRestoreArgs(**fields, asked_shape=tuple(leaf.shape))
    if release and isinstance(leaf, jax.Array):
        return ReleasingRestoreArgs(**fields, old=leaf)
    return type_handlers.SingleReplicaArrayRestoreArgs(**fields)


def _replacement(previous: type_handlers.TypeHandler, knobs: dict[str, Any]) -> BroadcastArrayHandler:
    """Returns our handler with these knobs; all other settings are those of the handler that it replaces."""
    settings = array_handler_settings(previous) if isinstance(previous, type_handlers.ArrayHandler) else {}
    if not settings:
        logging.warning("orbax_ext: replaces a %s, whose settings for saving it can't read", type(previous).__name__)
    if settings.get("array_metadata_store") is None:  # the stock single-replica handler's default, which can't save
        settings.pop("array_metadata_store", None)
    stock = isinstance(previous, type_handlers.SingleReplicaArrayHandler)
    if stock and not isinstance(previous, BroadcastArrayHandler):
        settings.update(stock_handlers.single_replica_settings(previous))
        if knobs.get("replica_axis") is not None:
            del settings["replica_axis_index"]
    return BroadcastArrayHandler(**{**settings, **knobs})


def handler_for_v1(context: Any, stock: type_handlers.ArrayHandler) -> type_handlers.ArrayHandler:
    """Returns the handler for a v1 Context, given the one that Orbax made for it."""
    knobs = v1_knobs(context)
    return stock if knobs is None or uses_pathways(stock) else _replacement(stock, knobs)


def _split_knobs(knobs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the knobs of our handler, ArrayHandler's included, and those of PyTreeCheckpointHandler."""
    options.require_known(knobs, (*array_handler_parameters(), *pytree_handler_parameters()))
    known = {*options.FIELDS, *array_handler_parameters()}
    ours = {name: value for name, value in knobs.items() if name in known}
    return ours, {name: value for name, value in knobs.items() if name not in known}
