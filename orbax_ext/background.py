"""Restores while the program compiles.

    pending = orbax_ext.restore_async(manager, step, args=args)
    compiled = jax.jit(step_function).lower(abstract).compile()
    state = pending.result()

Reading into host memory is in `transfer/host_reads.py`, taking it from there in `transfer/held_blocks.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import orbax.checkpoint as ocp

from orbax_ext import registration
from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.meeting.terms import Limits
from orbax_ext.storage import s3
from orbax_ext.transfer.held_blocks import HeldBlocks
from orbax_ext.transfer.host_reads import HostReads, Source
from orbax_ext.transfer.memory import host_memory_limit
from orbax_ext.transfer.pending_restore import PendingRestore as PendingRestore
from orbax_ext.transfer.pending_restore import ReadAheadRestore, Scope, WholeRestore
from orbax_ext.upstream.array_requests import ItemRestore, items_of_restore, items_there, restores_all_items
from orbax_ext.upstream.runtime import settings_of_thread

Exchange = Literal["result", "background"]


def restore_async(
    checkpointer: Any,
    step: Any,
    args: Any = None,
    *,
    exchange: Exchange = "result",
    host_memory_limit_bytes: int | None = None,
) -> PendingRestore:
    """Begins a restore and returns at once; `result()` of what it returns ends it.

    Until `result()` it runs no program on a device and waits for no other process: it reads this process's share of the
    checkpoint into host memory and then, with strategy "auto", what others would send it. `result()` then does the
    restore that `checkpointer.restore(step, args=args)` does, on all processes together, and takes what was read
    instead of reading it. What could not be held is read there.

    With `exchange="background"` the whole restore runs in another thread. Until `result()` has returned, the program
    must not run anything on its devices that concerns other processes, nor save: compiling is what it may do.

    If orbax_ext is not registered, `result()` registers it, with its defaults, as long as it restores. With
    `exchange="background"` it is registered until the restore has ended.

    Args:
      checkpointer: A `CheckpointManager` or a `Checkpointer`. Its array handlers must not be those of a registry of its
        own without orbax_ext.
      step: The step; for a `Checkpointer`, the path. None: the manager's latest step at this moment.
      args: The `args` of `checkpointer.restore`: `PyTreeRestore`, `StandardRestore`, or a `Composite` of items. None:
        everything, with the shardings that it was saved with.
      exchange: "result" or "background".
      host_memory_limit_bytes: Bytes that may be held in host memory before `result()`; by default an eighth of the
        host's available memory.
    """
    check(exchange, host_memory_limit_bytes)
    if not isinstance(checkpointer, ocp.CheckpointManager | ocp.Checkpointer):
        raise ValueError(
            f"restore_async takes a CheckpointManager or a Checkpointer; found a {_qualified(type(checkpointer))}. "
            "For Orbax's v1 API use orbax_ext.v1.load_async."
        )
    if isinstance(checkpointer, ocp.CheckpointManager):
        if step is None:
            step = checkpointer.latest_step()  # a later save must not change what is restored
        place = checkpointer.directory
    else:
        place = step = os.fspath(step)
    given = {} if args is None else {"args": args}
    items = items_of_restore(checkpointer, step, args)
    _require_registry(items)
    handlers = [_handler_for(item.array_handler) for item in items]
    sources: Iterable[Source] = map(_source, items, handlers)
    if not items:
        handlers = [_handler_for(ocp.type_handlers.get_type_handler(jax.Array))]
    if restores_all_items(checkpointer, args):
        sources = _sources_of_all(items_there(checkpointer, step), handlers[0])

    def restore() -> Any:
        if isinstance(checkpointer, ocp.StandardCheckpointer):  # its own `restore` takes no args
            return super(ocp.StandardCheckpointer, checkpointer).restore(step, **given)
        return checkpointer.restore(step, **given)

    whole = exchange == "background"
    with contextlib.ExitStack() as needed:
        needed.enter_context(s3.enabled_for(place))
        if whole:  # decided here, on all processes alike: the program may unregister before the thread looks
            needed.enter_context(registration.kept_registered())
        return begin(
            restore,
            sources,
            contextlib.nullcontext if whole else registration.kept_registered,
            needed,
            lambda: handlers[0].limits,
            exchange=exchange,
            host_memory_limit_bytes=host_memory_limit_bytes,
        )


def begin(
    restore: Callable[[], Any],
    sources: Iterable[Source],
    scope: Scope,
    needed: contextlib.ExitStack,
    limits: Callable[[], Limits],
    *,
    exchange: Exchange,
    host_memory_limit_bytes: int | None,
) -> PendingRestore:
    """Begins a restore. `sources` find out what it reads. `scope` is entered around it, in the thread that restores.

    `limits` returns those of waiting for another restore of this process.
    `needed` has been entered already. It is left when the restore has ended or was given up, in any thread.
    """
    if exchange == "background":
        return PendingRestore(WholeRestore(restore, scope, needed.pop_all(), limits))
    limit = host_memory_limit() if host_memory_limit_bytes is None else host_memory_limit_bytes
    reads = HostReads(sources, limit, settings_of_thread())
    return PendingRestore(ReadAheadRestore(restore, scope, needed.pop_all(), reads, limits))


def _qualified(kind: type) -> str:
    """Returns the name of a type with its module: Orbax's emergency manager has the name of the ordinary one."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check(exchange: Exchange, host_memory_limit_bytes: int | None) -> None:
    """Raises `ValueError` for bad arguments."""
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange must be one of {', '.join(get_args(Exchange))}; found {exchange!r}.")
    if host_memory_limit_bytes is not None and host_memory_limit_bytes < 0:
        raise ValueError(f"host_memory_limit_bytes must be 0 or more; found {host_memory_limit_bytes}.")


def _require_registry(items: Sequence[ItemRestore]) -> None:
    for item in items:
        if item.has_own_registry and registration.serving_handler(item.array_handler) is None:
            raise ValueError(
                f"{type(item.handler).__name__} has a type-handler registry of its own, whose handler of jax.Array is "
                f"{type(item.array_handler).__name__}: orbax_ext does not restore through it. Make it with "
                "orbax_ext.pytree_handler()."
            )


def _handler_for(registered: Any) -> BroadcastArrayHandler:
    """Returns the handler that will restore. Called at once: later the program may have left `registered()`."""
    return registration.serving_handler(registered) or registration.handler_in_place_of(registered)


def _source(item: ItemRestore, handler: BroadcastArrayHandler) -> Source:
    """Returns a function that finds out what an item's restore will read. It reads metadata."""
    return lambda: share_of(item, handler)


def _sources_of_all(items: Iterable[ItemRestore], registered: BroadcastArrayHandler) -> Iterator[Source]:
    """Yields the sources of items that have to be looked up in storage."""
    for item in items:
        handler = registration.serving_handler(item.array_handler) if item.has_own_registry else registered
        if handler is not None:
            yield _source(item, handler)


def share_of(item: ItemRestore, handler: BroadcastArrayHandler) -> HeldBlocks | None:
    """Returns a place for what this process will read of an item; None if that has no arrays. Reads metadata."""
    asked = item.array_request()
    return asyncio.run(handler.share(asked.infos, asked.args)) if asked and asked.infos else None
