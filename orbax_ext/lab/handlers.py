"""Other handlers of jax.Array in Orbax's registry for a while: what ours is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import type_handlers


@contextlib.contextmanager
def installed(handler: Any) -> Iterator[None]:
    """Has Orbax use a handler as long as a `with` block lasts; None leaves the one that is there."""
    before = type_handlers.get_type_handler(jax.Array)
    if handler is not None:
        type_handlers.register_type_handler(jax.Array, handler, override=True)
    try:
        yield
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)
