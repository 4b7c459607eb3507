from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext.transfer import release

pytestmark = pytest.mark.once


def args_of(state: Any) -> Any:
    return orbax_ext.restore_args(state, release=True)


def test_arrays_are_deleted_once_and_the_args_do_not_hold_them() -> None:
    shared = jnp.arange(3)
    args = args_of({"a": shared, "b": shared, "key": jax.random.key(0), "host": np.ones(2), "number": 1})
    release.release(jax.tree.leaves(args))
    release.release(jax.tree.leaves(args))
    assert shared.is_deleted()
    assert args["key"].old is None
    assert type(args["host"]) is ocp.RestoreArgs


def test_an_error_says_what_is_gone_only_if_something_is() -> None:
    args = list(args_of([jnp.arange(3), jnp.arange(4)]))
    with pytest.raises(ValueError, match="early") as early, release.loss_explained(args):
        raise ValueError("early")
    assert not hasattr(early.value, "__notes__")
    release.release(args[:1])
    with pytest.raises(ValueError, match="late") as late, release.loss_explained(args):
        raise ValueError("late")
    assert late.value.__notes__[0].startswith("The old state is gone: 1 of 2 leaves had been freed")


def test_an_abstract_tree_has_nothing_to_release() -> None:
    with pytest.raises(ValueError, match=r"with a jax.Array among its leaves; found ShapeDtypeStruct"):
        args_of([jax.ShapeDtypeStruct((3,), jnp.float32)])


def test_stacked_and_release_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="expected stacked or release, found both"):
        orbax_ext.restore_args([jnp.arange(3)], stacked=True, release=True)
