"""Contexts of Orbax's v1 API: which array handler they use, and our knobs that they carry."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from orbax.checkpoint import type_handlers
from orbax.checkpoint.experimental.v1._src.context import context as v1_context
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler as v1_array_leaf_handler

from orbax_ext.upstream.hooks import Hook

_KNOBS = "_orbax_ext_knobs"

Choose = Callable[[Any, type_handlers.ArrayHandler], type_handlers.ArrayHandler]


def _create_handler(original: Callable[[Any], type_handlers.ArrayHandler], choose: Choose) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def create(context: Any) -> type_handlers.ArrayHandler:
        return choose(context, original(context))

    return create


# Installed for `orbax_ext.v1.context` only, and with a function that returns the handler to use, given the Context and
# the handler that Orbax made for it. A Context that uses Orbax's own single-replica handler needs no hook of its own.
CREATE_HANDLER = Hook(
    v1_array_leaf_handler,
    "_create_v0_array_handler",
    "the array handler of every v1 Context",
    _create_handler,
)


def v1_context_with(base: Any, knobs: dict[str, Any]) -> Any:
    """Returns a v1 Context that carries our knobs, with the options of `base` or of the active Context.

    The knobs are an attribute of the options for loading arrays, because a Context made from this one inherits those.
    """
    derived = v1_context.Context(base if base is not None else v1_context.get_context())
    array_options = copy.copy(derived.array_options)
    loading = copy.copy(array_options.loading)
    # Options are frozen dataclasses before 0.12.0; since then they refuse changes while their Context is active.
    object.__setattr__(loading, _KNOBS, dict(knobs))
    object.__setattr__(array_options, "loading", loading)
    derived._array_options = array_options
    return derived


def active_v1_context() -> Any:
    """Returns the v1 Context that is active in this thread, or the default one."""
    return v1_context.get_context()


def v1_array_handler(context: Any) -> type_handlers.ArrayHandler:
    """Returns the array handler of a v1 Context."""
    return v1_array_leaf_handler._create_v0_array_handler(context)


def loads_in_part(context: Any) -> bool:
    """Returns whether a Context loads those leaves alone that the abstract tree has."""
    return bool(context.pytree_options.loading.partial_load)


def v1_knobs(context: Any) -> dict[str, Any] | None:
    """Returns the knobs that a v1 Context carries, or None if it does not carry any."""
    return getattr(context.array_options.loading, _KNOBS, None)
