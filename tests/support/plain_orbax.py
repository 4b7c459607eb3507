"""Restores the same checkpoint with plain Orbax and with orbax_ext, and compares them leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import orbax_ext
from orbax_ext.report.report import publish


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both restores on one process."""

    differences: list[str]
    errors: tuple[tuple[str, ...], tuple[str, ...]]  # built-in types of plain Orbax's error and of ours; empty if none
    messages: tuple[str, str]  # of the same errors
    strategy: dict[str, str]  # of each leaf that our handler restored


def compare(restore: Callable[[], Any], knobs: Mapping[str, Any], ours: Callable[[], Any] | None = None) -> Comparison:
    """Restores with plain Orbax, then with orbax_ext registered or with `ours` if given, and compares the results."""
    return _compare_with(_outcome(restore), restore, knobs, ours)


def compare_each(restore: Callable[[], Any], all_knobs: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Restores with plain Orbax once, then with orbax_ext for each set of knobs, and compares the results."""
    plain = _outcome(restore)
    return [_compare_with(plain, restore, knobs) for knobs in all_knobs]


def _compare_with(
    plain: tuple[Any, Exception | None],
    restore: Callable[[], Any],
    knobs: Mapping[str, Any],
    ours: Callable[[], Any] | None = None,
) -> Comparison:
    plain_tree, plain_error = plain
    publish(None)  # the report of an earlier restore would hide that orbax_ext was not used
    if ours is not None:
        our_tree, our_error = _outcome(ours)
    else:
        with orbax_ext.registered(**{"strategy": "single", **knobs}):
            our_tree, our_error = _outcome(restore)
    report = orbax_ext.last_report()
    return Comparison(
        [] if plain_error or our_error else differences(our_tree, plain_tree),
        (_types(plain_error), _types(our_error)),
        (str(plain_error or ""), str(our_error or "")),
        report.strategy if report else {},
    )


def differences(ours: Any, plain: Any) -> list[str]:
    """Returns where two trees differ: structure, types, dtypes, bytes, shardings, memory kinds."""
    our_structure, plain_structure = jax.tree.structure(ours), jax.tree.structure(plain)
    if our_structure != plain_structure:
        return [f"structure {our_structure}, not {plain_structure}"]
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(plain), strict=True)
    return [
        f"{jax.tree_util.keystr(path)}: {text}"
        for (path, our_leaf), plain_leaf in leaves
        for text in _leaf_differences(our_leaf, plain_leaf)
    ]


def assert_same(comparisons: Sequence[Comparison]) -> None:
    """Asserts that each process got what plain Orbax gives: the same tree, or the same type of error."""
    assert [
        f"process {process}: {text}"
        for process, comparison in enumerate(comparisons)
        for text in comparison.differences
    ] == []
    for comparison in comparisons:
        plain, ours = comparison.errors
        assert (bool(plain), set(plain) - set(ours)) == (bool(ours), set())


def assert_restored(comparisons: Sequence[Comparison]) -> None:
    """Asserts that each process got plain Orbax's tree, and neither restore raised an error."""
    assert_same(comparisons)
    for comparison in comparisons:
        assert comparison.errors == ((), ()), comparison.messages


def _leaf_differences(ours: Any, plain: Any) -> list[str]:
    if type(ours) is not type(plain):
        return [f"a {type(ours).__name__}, not a {type(plain).__name__}"]
    if not isinstance(plain, (jax.Array, np.ndarray, np.generic)):
        return [] if ours == plain else [f"{ours!r}, not {plain!r}"]
    texts = [f"{name} {get(ours)}, not {get(plain)}" for name, get in _PROPERTIES.items() if get(ours) != get(plain)]
    if not texts and _bits(ours) != _bits(plain):
        texts.append("bytes")
    return texts


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
    """Returns the built-in exception types that an error can be caught as, apart from Exception."""
    kinds = type(error).__mro__ if error is not None else ()
    return tuple(
        kind.__name__
        for kind in kinds
        if kind.__module__ == "builtins" and kind not in (object, BaseException, Exception)
    ) or (("Exception",) if error is not None else ())
