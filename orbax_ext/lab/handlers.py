"""Handlers of jax.Array in Orbax's registry for a while, to compare orbax_ext with Orbax's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import type_handlers

import orbax_ext


def registered(kind: str, **knobs: Any) -> contextlib.AbstractContextManager[Any]:
    """Registers a handler as long as a `with` block lasts.

    Args:
      kind: "ours", "stock" (Orbax's single-replica handler) or "plain" (the handler that is there already).
      knobs: Arguments of the handler; "plain" has none. Ours reads on one replica, as stock does, if not given a
        strategy.
    """
    if kind == "ours":
        return orbax_ext.registered(**{"strategy": "single", **knobs})
    return installed(type_handlers.SingleReplicaArrayHandler(**knobs) if kind == "stock" else None)


@contextlib.contextmanager
def installed(handler: Any) -> Iterator[None]:
    """Registers a handler object as long as a `with` block lasts; None keeps the one that is there."""
    before = type_handlers.get_type_handler(jax.Array)
    if handler is not None:
        type_handlers.register_type_handler(jax.Array, handler, override=True)
    try:
        yield
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)
