"""Frees the buffers of the old state just before new ones are placed: `restore_args(state, release=True)`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from orbax.checkpoint import type_handlers

from orbax_ext import errors, text


@dataclasses.dataclass
class ReleasingRestoreArgs(type_handlers.SingleReplicaArrayRestoreArgs):
    """Args of a leaf that replaces an array."""

    old: jax.Array | None = dataclasses.field(default=None, repr=False, compare=False)  # None once it is freed
    released: bool = dataclasses.field(default=False, repr=False, compare=False)


def require_arrays(state: Any) -> None:
    """Raises for a state without arrays: most likely an abstract tree was given."""
    leaves = jax.tree.leaves(state)
    if not any(isinstance(leaf, jax.Array) for leaf in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise ValueError(
            "restore_args(release=True): expected the state that the restore replaces, with a jax.Array among its "
            f"leaves; found {text.listing(kinds) or 'no leaves'}. Give it the state itself, or leave release out."
        )


def is_releasing(arg: Any) -> bool:
    """Returns whether a leaf replaces an array that is to be freed for it."""
    return isinstance(arg, ReleasingRestoreArgs)


def release(args: Iterable[Any]) -> None:
    """Frees the old arrays of leaves that are about to be placed. Not an error if they are freed already."""
    holding = [arg for arg in args if isinstance(arg, ReleasingRestoreArgs) and arg.old is not None]
    for arg in holding:
        old, arg.old, arg.released = arg.old, None, True
        if old is not None and not old.is_deleted():  # donated, or the same array is in another leaf
            old.delete()
    if holding:
        gc.collect(0)  # on CPU devices arrays may use numpy's memory, which JAX gives back at the next collection


@contextlib.contextmanager
def loss_explained(args: Sequence[Any]) -> Iterator[None]:
    """Adds to an error which part of the old state is gone, if any is."""
    try:
        yield
    except BaseException as error:
        gone = sum(isinstance(arg, ReleasingRestoreArgs) and arg.released for arg in args)
        if gone:
            errors.add_remark(
                error,
                f"The old state is gone: {gone} of {text.count(len(args), 'leaf')} had been freed on this process "
                "(restore_args(release=True)). Do not use it again: restore, or make a new one.",
            )
        raise
