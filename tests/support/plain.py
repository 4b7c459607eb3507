"""Plain Orbax as the measure: the same checkpoint restored by it and by orbax_ext, compared leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import orbax_ext


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What one process saw."""

    differences: list[str]
    errors: tuple[tuple[str, ...], tuple[str, ...]]  # built-in types of plain Orbax's error and of ours; empty if none
    messages: tuple[str, str]
    strategy: dict[str, str]  # of each leaf that came to our handler


def compare(restore: Callable[[], Any], knobs: Mapping[str, Any], ours: Callable[[], Any] | None = None) -> Comparison:
    """Restores plainly and then with orbax_ext registered, or by `ours` if that is given."""
    plain, plain_error = _outcome(restore)
    _last = None
    if ours is not None:
        found, our_error = _outcome(ours)
    else:
        with orbax_ext.registered(**{"strategy": "single", **knobs}):
            found, our_error = _outcome(restore)
    last = orbax_ext.last_report()
    differing = [] if plain_error or our_error else differences(found, plain)
    return Comparison(
        differing,
        (_types(plain_error), _types(our_error)),
        (str(plain_error or ""), str(our_error or "")),
        last.strategy if last else {},
    )


def differences(found: Any, plain: Any) -> list[str]:
    """Where one tree is not exactly as the other: structure, types, dtypes, bytes, shardings, memory kinds."""
    here, there = jax.tree.structure(found), jax.tree.structure(plain)
    if here != there:
        return [f"structure {here}, not {there}"]
    leaves = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(plain), strict=True)
    return [f"{jax.tree_util.keystr(path)}: {text}" for (path, ours), theirs in leaves for text in _leaf(ours, theirs)]


def agreed(found: Sequence[Comparison]) -> None:
    """Asserts that all processes got what plain Orbax gives: the same tree, or the same type of error."""
    assert [f"process {rank}: {text}" for rank, each in enumerate(found) for text in each.differences] == []
    for each in found:
        plain, ours = each.errors
        assert (bool(plain), set(plain) - set(ours)) == (bool(ours), set())


def _leaf(ours: Any, plain: Any) -> list[str]:
    if type(ours) is not type(plain):
        return [f"a {type(ours).__name__}, not a {type(plain).__name__}"]
    if not isinstance(plain, (jax.Array, np.ndarray, np.generic)):
        return [] if ours == plain else [f"{ours!r}, not {plain!r}"]
    found = [f"{name} {get(ours)}, not {get(plain)}" for name, get in _PROPERTIES.items() if get(ours) != get(plain)]
    if not found and _bits(ours) != _bits(plain):
        found.append("bytes")
    return found


def _of_sharding(name: str) -> Callable[[Any], Any]:
    return lambda array: getattr(getattr(array, "sharding", None), name, None)


_PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda array: array.shape,
    "dtype": lambda array: array.dtype,
    "weak type": lambda array: getattr(array, "weak_type", None),
    "sharding": lambda array: getattr(array, "sharding", None),
    "spec": lambda array: repr(_of_sharding("spec")(array)),
    "axis types": lambda array: getattr(_of_sharding("mesh")(array), "axis_types", None),
    "memory kind": _of_sharding("memory_kind"),
    "layout": lambda array: repr(getattr(getattr(array, "format", None), "layout", None)),
    "committed": lambda array: getattr(array, "committed", None),
    "shards": lambda array: [
        (shard.device.id, str(shard.index), shard.replica_id, shard.data.sharding.memory_kind)
        for shard in _shards(array)
    ],
}


def _shards(array: Any) -> list[Any]:
    return sorted(getattr(array, "addressable_shards", []), key=lambda shard: shard.device.id)


def _bits(array: Any) -> list[bytes]:
    if not isinstance(array, jax.Array):
        return [np.asarray(array).tobytes()]
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return [np.asarray(shard.data).tobytes() for shard in _shards(array)]


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return jax.block_until_ready(work()), None
    except Exception as error:
        return None, error


def _types(error: Exception | None) -> tuple[str, ...]:
    """The built-in exception types that an error can be caught as, Exception aside."""
    kinds = type(error).__mro__ if error is not None else ()
    return tuple(
        kind.__name__
        for kind in kinds
        if kind.__module__ == "builtins" and kind not in (object, BaseException, Exception)
    ) or (("Exception",) if error is not None else ())
