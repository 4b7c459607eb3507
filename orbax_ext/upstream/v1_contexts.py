"""Contexts of Orbax's v1 API: which array handler they use, and our knobs that they carry."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from orbax.checkpoint import type_handlers
from orbax.checkpoint.experimental.v1._src.context import context as v1_context
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler as v1_array_leaf_handler

_KNOBS = "_orbax_ext_knobs"
_create_stock_handler = v1_array_leaf_handler._create_v0_array_handler


def hook_v1_array_handlers(choose: Callable[[Any, type_handlers.ArrayHandler], type_handlers.ArrayHandler]) -> None:
    """Makes every v1 Context use the array handler that `choose(context, stock handler)` returns.

    Every supported release of v1 calls a function of this name to make it. Hooking it again replaces the first hook.
    """

    def create(context: Any) -> type_handlers.ArrayHandler:
        return choose(context, _create_stock_handler(context))

    v1_array_leaf_handler._create_v0_array_handler = create


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


def v1_knobs(context: Any) -> dict[str, Any] | None:
    """Returns the knobs that a v1 Context carries, or None if it does not carry any."""
    return getattr(context.array_options.loading, _KNOBS, None)
