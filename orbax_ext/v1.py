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

import functools
from typing import Any, Unpack

from orbax_ext import options
from orbax_ext.handler import BroadcastArrayHandler, HandlerKnobs
from orbax_ext.registration import handler_for_v1
from orbax_ext.upstream.hooks import install
from orbax_ext.upstream.v1_contexts import CREATE_HANDLER, v1_context_with


@options.with_knobs_in_signature
def context(context: Any = None, **knobs: Unpack[HandlerKnobs]) -> Any:
    """Returns a v1 `Context` whose arrays are loaded through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    It has all options of the given Context, or of the active one. If that has `use_load_and_broadcast` set, its
    `LoadAndBroadcastOptions` fill in the knobs that are not given.
    """
    BroadcastArrayHandler(**knobs)  # raises for bad knobs here, not in the first load
    _install_hook()
    return v1_context_with(context, dict(knobs))


@functools.cache
def _install_hook() -> None:
    """Lets Contexts that carry knobs have our handler. It is never undone, because such a Context may live on."""
    install([CREATE_HANDLER], handler_for_v1)
