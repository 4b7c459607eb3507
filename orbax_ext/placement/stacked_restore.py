"""Checkpoints of pmap's stacked state into state without the leading device axis, and the other way round.

A stacked leaf has a row for each device, all the same. Where one side of a restore is stacked and the other is not,
the leaf is asked for in the form that the checkpoint can give, one row of it at most, and the axis is dropped or
added afterwards, on each device from what it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext.placement import pieces, specs
from orbax_ext.upstream.array_handler import saved_arrays

Shape = tuple[int, ...]
Restore = Callable[[Sequence[Any], Sequence[Any]], Awaitable[Sequence[jax.Array]]]


@dataclasses.dataclass
class StackedRestoreArgs(type_handlers.SingleReplicaArrayRestoreArgs):
    """Restore args of a leaf that may be stacked in the checkpoint, or here. Made by `restore_args(stacked=True)`."""

    asked_shape: Shape | None = None  # of keys too, for which Orbax wants no global_shape


def require_shardings(abstract: Any) -> None:
    """Raises for a leaf without a sharding: Orbax restores it as a numpy array, past our handler, stacked or not."""
    for name, leaf in pieces.named_leaves(abstract):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            raise ValueError(
                f"restore_args(stacked=True): leaf {name}: expected a jax.ShapeDtypeStruct with a sharding, found one "
                "without. Give every leaf of the abstract tree the sharding that it shall have."
            )


async def restore(
    handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any], plainly: Restore
) -> Sequence[jax.Array]:
    """Restores with `plainly(infos, args)`, by way of the other form where a leaf is stacked on one side only.

    A restore that fails for such leaves, because the args do not allow for it, is told about them.
    """
    changed = await detours(handler, infos, args)
    try:
        arrays = await plainly(
            infos, [changed[index].arg if index in changed else arg for index, arg in enumerate(args)]
        )
    except Exception as error:
        await _explain(error, handler, infos, args)
        raise
    return [changed[index].finish(array) if index in changed else array for index, array in enumerate(arrays)]


async def _explain(
    error: Exception, handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]
) -> None:
    try:
        words = await hint(handler, infos, args)
    except Exception as other:  # the error itself matters more than a word on it
        logging.warning("orbax_ext: could not look at the stored shapes: %s", other)
        return
    if words:
        logging.error("orbax_ext: %s", words)
        error.add_note(words)


@dataclasses.dataclass(frozen=True)
class Detour:
    """How a leaf is asked for instead, and what has to be made of it."""

    arg: Any  # the restore args to use
    target: Any  # the sharding that was asked for
    shape: Shape  # the shape that was asked for
    stacked_in_checkpoint: bool

    def finish(self, array: jax.Array) -> jax.Array:
        if pieces.is_key(array):
            data = self._finish(jax.random.key_data(array))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return self._finish(array)

    def _finish(self, array: jax.Array) -> jax.Array:
        if self.stacked_in_checkpoint:
            shape = array.shape[1:]
            by_box = {specs.box(s.index[1:], shape): np.asarray(s.data)[0] for s in array.addressable_shards}
            parts = [by_box[specs.box(index, shape)] for index in _indices(self.target, shape)]
        else:
            shape = (self.shape[0], *array.shape)
            rows = self.target.shard_shape(shape)[0]
            by_box = {specs.box(s.index, array.shape): np.asarray(s.data) for s in array.addressable_shards}
            own = [by_box[specs.box(index[1:], array.shape)] for index in _indices(self.target, shape)]
            parts = [np.broadcast_to(part, (rows, *part.shape)) for part in own]
        return pieces.assemble(shape, array.dtype, self.target, parts)


async def detours(handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]) -> dict[int, Detour]:
    """The leaves, by number, that are stacked on one side only, of those whose args allow for it."""
    marked = [index for index, arg in enumerate(args) if isinstance(arg, StackedRestoreArgs)]
    if not marked:
        return {}
    found = {}
    stored = await stored_shapes(handler, [infos[index] for index in marked])
    for index, (shape, is_key) in zip(marked, stored, strict=True):
        detour = _detour(infos[index].name, shape, is_key, args[index])
        if detour is not None:
            found[index] = detour
    return found


async def stored_shapes(handler: type_handlers.ArrayHandler, infos: Sequence[Any]) -> list[tuple[Shape, bool]]:
    """The shapes of the leaves in the checkpoint and whether they are typed keys, without their data's own axis."""
    metadata = await handler.metadata(infos)
    saved = await saved_arrays(handler, infos[0].parent_dir)
    keys = {name for name, array in saved.items() if array.key_impl}
    return [
        (tuple(stored.shape)[:-1], True) if info.name in keys else (tuple(stored.shape), False)
        for info, stored in zip(infos, metadata, strict=True)
    ]


async def hint(handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]) -> str:
    """What to tell someone whose restore failed, if the shapes look like pmap's stacked state; otherwise ""."""
    asked = {
        index: arg.global_shape for index, arg in enumerate(args) if getattr(arg, "global_shape", None) is not None
    }
    if not asked:
        return ""
    stored = await stored_shapes(handler, [infos[index] for index in asked])
    return advice(
        {infos[index].name: (there, tuple(asked[index])) for index, (there, _) in zip(asked, stored, strict=True)}
    )


def advice(shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """Words for leaves whose (stored, asked) shapes differ by a leading axis, as pmap's state does; "" if none do."""
    odd = {name: pair for name, pair in shapes.items() if is_stacked(*pair) or is_stacked(*reversed(pair))}
    if not odd:
        return ""
    name, (there, here) = next(iter(odd.items()))
    others = f" and {len(odd) - 1} more leaves" if len(odd) > 1 else ""
    return (
        f"The shapes of leaf {name}{others} differ by a leading axis, as if one side were pmap's stacked state: "
        f"{there} in the checkpoint, {here} asked for. To drop or add that axis while restoring, pass "
        "restore_args=orbax_ext.restore_args(abstract, stacked=True)."
    )


def is_stacked(shape: Sequence[int], one: Sequence[int]) -> bool:
    """Whether the first shape is the second under one more, leading, axis."""
    return len(shape) == len(one) + 1 and tuple(shape[1:]) == tuple(one)


def _detour(name: str, stored: Shape, is_key: bool, arg: StackedRestoreArgs) -> Detour | None:
    asked = arg.asked_shape
    if asked is None or asked == stored or not (is_stacked(stored, asked) or is_stacked(asked, stored)):
        return None
    target = arg.sharding
    if not isinstance(target, NamedSharding | SingleDeviceSharding):
        raise ValueError(
            f"restore_args(stacked=True): leaf {name}: expected a NamedSharding or SingleDeviceSharding to restore a "
            f"leaf of shape {stored} as {asked}, found {target!r}. Give it a sharding in the abstract tree."
        )
    if is_stacked(stored, asked):
        # Orbax cuts off what lies beyond the shape asked for: all rows but the first are never read.
        shape, near = (1, *asked), _respec(target, (None, *_spec(target)))
        near = _respec(target, ()) if is_key else near  # of keys all rows are read: a few bytes each
        return Detour(_plain(arg, shape, near, is_key), target, asked, stacked_in_checkpoint=True)
    near = _respec(target, _spec(target)[1:])
    return Detour(_plain(arg, stored, near, is_key), target, asked, stacked_in_checkpoint=False)


def _plain(arg: StackedRestoreArgs, shape: Shape, sharding: Any, is_key: bool) -> type_handlers.RestoreArgs:
    """The same wish for another shape, in args that this module does not look at again."""
    kept = {field.name: getattr(arg, field.name) for field in dataclasses.fields(type_handlers.ArrayRestoreArgs)}
    wanted = None if is_key else shape
    changed = {"sharding": sharding, "global_shape": wanted, "shape": wanted, "strict": False}
    return type_handlers.SingleReplicaArrayRestoreArgs(**{**kept, **changed})


def _spec(sharding: Any) -> tuple[Any, ...]:
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _respec(sharding: Any, spec: tuple[Any, ...]) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _indices(sharding: Any, shape: Shape) -> list[specs.Index]:
    return list(sharding.addressable_devices_indices_map(shape).values())
