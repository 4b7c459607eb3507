"""What a manager's or a checkpointer's restore will ask the array handler for, found out without restoring anything.

A copy of the item's own handler restores with a registry in which the array handler only notes what it is asked for,
and all other handlers return nothing. That reads metadata files; it touches no device and has no barrier of Orbax's.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_args, type_handlers
from orbax.checkpoint._src.handlers import handler_type_registry
from orbax.checkpoint._src.serialization.type_handler_registry import GLOBAL_TYPE_HANDLER_REGISTRY

_DEFAULT_ITEM = "default"
_STEP_METADATA = "_CHECKPOINT_METADATA"


@dataclasses.dataclass(frozen=True)
class ArrayRequest:
    """The arguments of the call of the array handler's `deserialize`."""

    infos: Sequence[Any]  # Orbax's ParamInfos
    args: Sequence[Any]  # Orbax's RestoreArgs


@dataclasses.dataclass(frozen=True)
class ItemRestore:
    """One item of a checkpoint that will be restored by a handler of Orbax for trees."""

    directory: Callable[[], epath.Path]  # may look into storage
    args: Any
    handler: Any  # a PyTreeCheckpointHandler or StandardCheckpointHandler

    @property
    def array_handler(self) -> type_handlers.TypeHandler:
        """The array handler that is registered now where this item's handler looks for it."""
        return _tree_handler(self.handler)._type_handler_registry.get(jax.Array)

    @property
    def has_own_registry(self) -> bool:
        """Whether `register_type_handler` does not reach the item's handler."""
        return _tree_handler(self.handler)._type_handler_registry is not GLOBAL_TYPE_HANDLER_REGISTRY

    def array_request(self) -> ArrayRequest | None:
        """Returns what the array handler will be asked for; None if there are no arrays. Raises what Orbax raises."""
        registry = _RecordingRegistry(_tree_handler(self.handler)._type_handler_registry)
        try:
            _with_registry(self.handler, registry).restore(self.directory(), args=self.args)
        except Exception:
            if registry.request is None:
                raise  # otherwise Orbax does not know what to do with leaves that are None: it has asked for all
        return registry.request


def items_of_restore(checkpointer: Any, step_or_path: Any, args: Any) -> list[ItemRestore]:
    """Returns the items with trees that `checkpointer.restore(step_or_path, args=args)` will restore.

    `checkpointer` is a `CheckpointManager` or a `Checkpointer`. Items for which Orbax has no handler are left out: the
    restore itself raises the error. If `restores_all_items`, only storage knows them: see `items_there`.
    """
    if isinstance(checkpointer, ocp.CheckpointManager):
        inner, place = checkpointer._checkpointer, _step_place(checkpointer, step_or_path)
        composite = args if isinstance(args, ocp.args.Composite) else ocp.args.Composite(**{_DEFAULT_ITEM: args})
    else:
        inner, place = checkpointer, lambda: epath.Path(step_or_path)
        composite = args
    if restores_all_items(checkpointer, args):
        return []
    handler = inner.handler
    if not isinstance(handler, ocp.CompositeCheckpointHandler):
        return [ItemRestore(place, args, handler)] if _is_tree_handler(handler) else []
    items = []
    for name, item_args in sorted(composite.items()) if isinstance(composite, ocp.args.Composite) else ():
        try:
            item_handler = handler._get_or_set_handler(name, item_args)
        except (ValueError, KeyError):
            continue
        if _is_tree_handler(item_handler):
            items.append(ItemRestore(_below(place, name), item_args, item_handler))
    return items


def restores_all_items(checkpointer: Any, args: Any) -> bool:
    """Returns whether a restore with these args is that of all items of a step."""
    manager = isinstance(checkpointer, ocp.CheckpointManager)
    handler = checkpointer._checkpointer.handler if manager else checkpointer.handler
    named = args is not None and not (isinstance(args, ocp.args.Composite) and not args.items())
    return not named and isinstance(handler, ocp.CompositeCheckpointHandler)


def items_there(checkpointer: Any, step_or_path: Any) -> Iterator[ItemRestore]:
    """Yields the items with trees of a step, as Orbax restores them without args. Looks into storage."""
    manager = isinstance(checkpointer, ocp.CheckpointManager)
    handler = checkpointer._checkpointer.handler if manager else checkpointer.handler
    place = _step_place(checkpointer, step_or_path) if manager else lambda: epath.Path(step_or_path)
    known = dict(handler._get_all_registered_and_unregistered_items_and_handlers())
    names = sorted(handler._existing_items(place()))
    kinds = {} if known.keys() >= {*names} else json.loads((place() / _STEP_METADATA).read_text())["item_handlers"]
    for name in names:
        item_handler = known[name] if name in known else handler_type_registry.get_handler_type(kinds[name])()
        if _is_tree_handler(item_handler):
            _, restore_args = checkpoint_args.get_registered_args_cls(item_handler)
            yield ItemRestore(_below(place, name), restore_args(), item_handler)


def item_at(directory: str | os.PathLike[str], args: ocp.args.PyTreeRestore) -> ItemRestore:
    """Returns the restore of a tree in a directory by a handler of its own."""
    path = epath.Path(directory)
    return ItemRestore(lambda: path, args, ocp.PyTreeCheckpointHandler())


def _step_place(manager: Any, step: int) -> Callable[[], epath.Path]:
    def place() -> epath.Path:
        found: epath.Path = manager._get_read_step_directory(step, epath.Path(manager.directory))
        return found

    return place


def _below(place: Callable[[], epath.Path], name: str) -> Callable[[], epath.Path]:
    return lambda: place() / name


def _is_tree_handler(handler: Any) -> bool:
    return isinstance(_tree_handler(handler), ocp.PyTreeCheckpointHandler)


def _tree_handler(handler: Any) -> Any:
    return handler._impl if isinstance(handler, ocp.StandardCheckpointHandler) else handler


def _with_registry(handler: Any, registry: Any) -> Any:
    """Returns a copy of a handler that looks in another registry."""
    made = copy.copy(handler)
    if isinstance(handler, ocp.StandardCheckpointHandler):
        made._impl = _with_registry(handler._impl, registry)
        return made
    made._type_handler_registry = registry
    made._handler_impl = copy.copy(handler._handler_impl)
    made._handler_impl._type_handler_registry = registry
    return made


class _RecordingRegistry:
    """A registry whose handlers restore nothing."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._made: dict[Any, Any] = {}  # Orbax asks each handler once for all its leaves
        self.request: ArrayRequest | None = None

    def get(self, kind: Any) -> Any:
        handler = self._registry.get(kind)
        if handler not in self._made:
            made = self._made[handler] = copy.copy(handler)
            made.deserialize = self._note if isinstance(handler, type_handlers.ArrayHandler) else _nothing
        return self._made[handler]

    def has(self, kind: Any) -> bool:
        return bool(self._registry.has(kind))

    async def _note(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[None]:
        self.request = ArrayRequest(infos, args or ())
        return [None] * len(infos)


async def _nothing(infos: Sequence[Any], args: Sequence[Any] | None = None) -> list[None]:
    return [None] * len(infos)
