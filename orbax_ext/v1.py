"""For Orbax's v1 API: Contexts whose arrays are loaded through orbax_ext.

    with orbax_ext.v1.context(replica_axis="dp"):
        state = ocp.load(path, abstract)

The knobs are part of the Context's own options, so they go where the Context goes: into Contexts that are made from it,
into a `training.Checkpointer` that keeps it, and into the background of `load_async`. Nothing has to be undone:
outside such a Context v1 loads as before.

After `orbax_ext.register(...)`, orbax_ext also loads for a user's own Context if it has `use_load_and_broadcast` set,
as it does for every other user of Orbax's own single-replica handler.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from etils import epath

from orbax_ext import options
from orbax_ext.background import Exchange, begin, check, share_of
from orbax_ext.handler import BroadcastArrayHandler, HandlerKnobs
from orbax_ext.registration import handler_for_v1, restore_args
from orbax_ext.storage import checkpoint, s3
from orbax_ext.transfer.held_blocks import HeldBlocks
from orbax_ext.transfer.pending_restore import PendingRestore
from orbax_ext.upstream.array_requests import item_at
from orbax_ext.upstream.hooks import install
from orbax_ext.upstream.v1_contexts import (
    CREATE_HANDLER,
    active_v1_context,
    loads_in_part,
    v1_array_handler,
    v1_context_with,
    v1_knobs,
)

_ITEMS = ("pytree", "state")  # that Orbax loads where it finds them


@options.with_knobs_in_signature
def context(context: Any = None, **knobs: Unpack[HandlerKnobs]) -> Any:
    """Returns a v1 `Context` whose arrays are loaded through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    It has all options of the given Context, or of the active one. If that has `use_load_and_broadcast` set, its
    `LoadAndBroadcastOptions` fill in the knobs that are not given.
    """
    BroadcastArrayHandler(**knobs)  # raises for bad knobs here, not in the first load
    _install_hook()
    return v1_context_with(context, dict(knobs))


def load_async(
    path: str | os.PathLike[str],
    abstract: Any = None,
    *,
    exchange: Exchange = "result",
    host_memory_limit_bytes: int | None = None,
    **load_kwargs: Any,
) -> PendingRestore:
    """Begins `ocp.load(path, abstract)` and returns at once: `orbax_ext.restore_async` for the v1 API, see there.

    It has all options of the Context that is active now, also if `result()` is called outside of it. The knobs are
    those of `context`, if it is active; otherwise those of `orbax_ext.register`; otherwise the defaults.
    """
    check(exchange, host_memory_limit_bytes)
    active = active_v1_context()
    _install_hook()
    loading = v1_context_with(active, _knobs_of(active))
    handler = v1_array_handler(loading)
    assert isinstance(handler, BroadcastArrayHandler)

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with v1_context_with(loading, _knobs_of(loading)), s3.waiting_within(handler.limits):
            yield

    def describe() -> HeldBlocks | None:
        args = ocp.args.PyTreeRestore(partial_restore=loads_in_part(loading))
        if abstract is not None:
            args.item, args.restore_args = abstract, restore_args(abstract)
        return share_of(item_at(_item(path, load_kwargs), args), handler)

    load = getattr(ocp_v1, "load", None) or ocp_v1.load_pytree  # which is deprecated since there is `load`
    with contextlib.ExitStack() as needed:
        needed.enter_context(s3.enabled_for(path))
        return begin(
            lambda: load(path, abstract, **load_kwargs),
            [describe],
            scope,
            needed,
            lambda: handler.limits,
            exchange=exchange,
            host_memory_limit_bytes=host_memory_limit_bytes,
        )


def _knobs_of(context: Any) -> dict[str, Any]:
    """Returns the knobs with which a Context loads, or with which one without knobs would."""
    knobs = v1_knobs(context)
    if knobs is not None:
        return knobs
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    if not isinstance(registered, BroadcastArrayHandler):
        return {}
    return {name: value for name in options.FIELDS if (value := getattr(registered.options, name)) is not None}


def _item(path: str | os.PathLike[str], load_kwargs: Mapping[str, Any]) -> epath.Path:
    """Returns the directory that `ocp.load` loads from, as far as it can be known without Orbax."""
    name = load_kwargs.get("checkpointable_name")
    if isinstance(name, str) and (epath.Path(path) / name).exists():
        return epath.Path(path) / name
    found = sorted(checkpoint.locate(path), key=lambda item: (item.name not in _ITEMS, item.name))
    return found[0]


@functools.cache
def _install_hook() -> None:
    """Lets Contexts that carry knobs have our handler. It is never undone, because such a Context may live on."""
    install([CREATE_HANDLER], handler_for_v1)
