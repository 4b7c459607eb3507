"""The door for Orbax's v1 API: Contexts whose arrays are loaded through orbax_ext.

    with orbax_ext.v1.context(replica_axis="dp"):
        state = ocp.load(path, abstract)

The wish is part of the Context's own options, so it goes where the Context goes: into Contexts that are made from it,
into a `training.Checkpointer` that keeps it, and into the background of `load_async`. Nothing has to be undone:
outside such a Context v1 loads as it always did.

After `orbax_ext.register(...)` a Context of the user's own that has `use_load_and_broadcast` set is served as well.
"""

from __future__ import annotations

from typing import Any

from orbax_ext.handler import BroadcastArrayHandler
from orbax_ext.registration import handler_for_v1
from orbax_ext.upstream.v1_contexts import hook_v1_array_handlers, v1_context_with


def context(context: Any = None, **knobs: Any) -> Any:
    """A v1 `Context` whose arrays are loaded through orbax_ext; takes the knobs of `BroadcastArrayHandler`.

    It has all options of the Context given, or of the one that is active. Where that one has
    `use_load_and_broadcast` set, its `LoadAndBroadcastOptions` fill in the knobs that are not given.
    """
    BroadcastArrayHandler(**knobs)  # bad knobs shall fail here, not when something is loaded
    hook_v1_array_handlers(handler_for_v1)
    return v1_context_with(context, knobs)
