"""Contexts of Orbax's v1 API: which array handler they use, and knobs that travel with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from orbax.checkpoint import type_handlers
from orbax.checkpoint.experimental.v1._src.context import context as v1_context
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler as v1_array_leaf_handler

_V1_KNOBS = "_orbax_ext_knobs"
_v1_array_handler = v1_array_leaf_handler._create_v0_array_handler


def hook_v1_array_handlers(choose: Callable[[Any, type_handlers.ArrayHandler], type_handlers.ArrayHandler]) -> None:
    """Lets `choose(context, stock handler)` have the last word on the array handler of every v1 Context.

    v1 asks a function of this name for it in every supported release. Setting it again changes nothing.
    """

    def create(context: Any) -> type_handlers.ArrayHandler:
        return choose(context, _v1_array_handler(context))

    v1_array_leaf_handler._create_v0_array_handler = create


def v1_context_with(base: Any, knobs: dict[str, Any]) -> Any:
    """A v1 Context with the options of `base`, or of the active one, that carries our knobs.

    They are an attribute of its options for loading arrays: these are what a Context made from this one inherits.
    """
    derived = v1_context.Context(base if base is not None else v1_context.get_context())
    array_options = copy.copy(derived.array_options)
    loading = copy.copy(array_options.loading)
    # Options are frozen dataclasses before 0.12.0 and refuse changes while their Context is active since.
    object.__setattr__(loading, _V1_KNOBS, dict(knobs))
    object.__setattr__(array_options, "loading", loading)
    derived._array_options = array_options
    return derived


def v1_knobs(context: Any) -> dict[str, Any] | None:
    """The knobs that a v1 Context carries, or None if it is not one of ours."""
    return getattr(context.array_options.loading, _V1_KNOBS, None)
