"""The function with which Orbax reads one array, replaced for a while: to rehearse storage that is slow or late."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from orbax.checkpoint._src.serialization import serialization

Read = Callable[..., Awaitable[Any]]


@contextlib.contextmanager
def replaced(replace: Callable[[Read], Read]) -> Iterator[None]:
    """Replaces the function on this process, for Orbax's handlers and for ours."""
    original = serialization.async_deserialize
    serialization.async_deserialize = replace(original)
    try:
        yield
    finally:
        serialization.async_deserialize = original
