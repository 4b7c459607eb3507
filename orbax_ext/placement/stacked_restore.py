"""Restores checkpoints of pmap's stacked state into state without the leading device axis, and the reverse.

A stacked leaf has one row per device, all equal. Where only the checkpoint or only the target is stacked, the leaf is
restored as it is stored, at most one row of it, and each device then drops or adds the axis on its own data.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext import errors
from orbax_ext import text as text_lib
from orbax_ext.meeting.arrival import failing_together
from orbax_ext.meeting.terms import Limits
from orbax_ext.placement import pieces, specs, stacked
from orbax_ext.redact import redact
from orbax_ext.storage import array_metadata
from orbax_ext.storage.stall import while_storage_answers
from orbax_ext.upstream.array_handler import saved_arrays

_ADVICE_LIMIT = 10.0  # seconds: the restore has failed, and advice about the error is not worth more
_NOT_ABOUT_SHAPES = (errors.RestoreTimeoutError, errors.PlanMismatchError, OSError)

Shape = tuple[int, ...]
RestoreLeaves = Callable[[Sequence[Any], Sequence[Any]], Awaitable[Sequence[jax.Array]]]


@dataclasses.dataclass
class StackedRestoreArgs(type_handlers.SingleReplicaArrayRestoreArgs):
    """Args of a leaf that may be stacked in the checkpoint or in the target, from `restore_args(stacked=True)`."""

    asked_shape: Shape | None = None  # for keys too, which must have no global_shape for Orbax


def require_shardings(abstract: Any) -> None:
    """Raises for a leaf without a sharding: Orbax would restore it as a numpy array, without our handler."""
    for name, leaf in pieces.named_leaves(abstract):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            raise ValueError(
                f"restore_args(stacked=True): leaf {name}: expected a jax.ShapeDtypeStruct with a sharding, found one "
                "without. Give every leaf of the abstract tree its sharding."
            )


async def restore(
    handler: type_handlers.ArrayHandler,
    limits: Limits,
    infos: Sequence[Any],
    args: Sequence[Any],
    restore_leaves: RestoreLeaves,
) -> Sequence[jax.Array]:
    """Restores with `restore_leaves(infos, args)`, and converts leaves that are stacked on one side only.

    If a restore fails and its leaves differ by a leading axis that the args do not allow for, the error says so.
    """
    async with failing_together(limits):  # the others wait for this process at the first meeting of the restore
        conversions = await while_storage_answers(_conversions(handler, infos, args), limits.stall)
    try:
        arrays = await restore_leaves(infos, _stored_args_of(args, conversions))
    except Exception as error:
        if not isinstance(error, _NOT_ABOUT_SHAPES):
            await _add_advice(error, handler, infos, args)
        raise
    return [conversions[index].convert(array) if index in conversions else array for index, array in enumerate(arrays)]


async def stored_args(handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
    """Returns the restore args of the leaves as they are stored: those that `restore_leaves` is called with."""
    return _stored_args_of(args, await _conversions(handler, infos, args))


def _stored_args_of(args: Sequence[Any], conversions: Mapping[int, StackConversion]) -> Sequence[Any]:
    return [conversions[index].args if index in conversions else arg for index, arg in enumerate(args)]


async def _add_advice(
    error: Exception, handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]
) -> None:
    asked = {
        index: arg.global_shape for index, arg in enumerate(args) if getattr(arg, "global_shape", None) is not None
    }
    if not asked:
        return
    try:
        reading = _stored_shapes(handler, [infos[index] for index in asked])
        stored = await asyncio.wait_for(reading, _ADVICE_LIMIT)
        note = advice(
            {infos[index].name: (shape, tuple(asked[index])) for index, (shape, _) in zip(asked, stored, strict=True)}
        )
    except Exception as other:  # the first error matters more than advice about it
        logging.warning("orbax_ext: could not read the stored shapes: %s", redact(str(other)))
        return
    if note:
        logging.error("orbax_ext: %s", note)
        error.add_note(note)


@dataclasses.dataclass(frozen=True)
class StackConversion:
    """How to restore a leaf as it is stored, and convert it to what was asked for."""

    args: Any  # restore args for the leaf as stored
    sharding: Any  # the sharding asked for
    shape: Shape  # the shape asked for
    stacked_in_checkpoint: bool

    def convert(self, array: jax.Array) -> jax.Array:
        """Returns the restored leaf with the shape and sharding asked for."""
        if pieces.is_key(array):
            return jax.random.wrap_key_data(self.convert(jax.random.key_data(array)), impl=jax.random.key_impl(array))
        if self.stacked_in_checkpoint:
            return stacked.first_row(array, self.sharding)
        shape = (self.shape[0], *array.shape)
        rows = self.sharding.shard_shape(shape)[0]
        by_box = {specs.box(s.index, array.shape): np.asarray(s.data) for s in array.addressable_shards}
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        rows_here = [by_box[specs.box(index[1:], array.shape)] for index in indices]
        parts = [np.broadcast_to(row, (rows, *row.shape)) for row in rows_here]
        return pieces.assemble(shape, array.dtype, self.sharding, parts)


async def _conversions(
    handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]
) -> dict[int, StackConversion]:
    """Returns the conversions, by number of the leaf, of leaves that are stacked on one side only and may be."""
    marked = [index for index, arg in enumerate(args) if isinstance(arg, StackedRestoreArgs)]
    if not marked:
        return {}
    stored = await _stored_shapes(handler, [infos[index] for index in marked])
    conversions = {
        index: conversion(infos[index].name, shape, is_key, args[index])
        for index, (shape, is_key) in zip(marked, stored, strict=True)
    }
    return {index: needed for index, needed in conversions.items() if needed is not None}


async def _stored_shapes(handler: type_handlers.ArrayHandler, infos: Sequence[Any]) -> list[tuple[Shape, bool]]:
    """Returns the leaves' shapes in the checkpoint and whether they are typed keys, whose data axis is left out."""
    metadata = await array_metadata.read(handler, infos, shardings=False)
    saved = await saved_arrays(handler, infos[0].parent_dir)
    keys = {name for name, array in saved.items() if array.key_impl}
    return [
        (tuple(stored.shape)[:-1], True) if info.name in keys else (tuple(stored.shape), False)
        for info, stored in zip(infos, metadata, strict=True)
    ]


def advice(shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """Returns advice for leaves whose (stored, asked) shapes differ by a leading axis, as pmap's do; "" if none do."""
    odd = {name: pair for name, pair in shapes.items() if is_stacked(*pair) or is_stacked(*reversed(pair))}
    if not odd:
        return ""
    stored, asked = next(iter(odd.values()))
    return (
        f"The shapes of leaf {text_lib.listing(odd, 1)} differ by a leading axis, as if one side were pmap's stacked "
        f"state: {stored} in the checkpoint, {asked} asked for. To drop or add that axis while restoring, pass "
        "restore_args=orbax_ext.restore_args(abstract, stacked=True)."
    )


def is_stacked(shape: Sequence[int], one: Sequence[int]) -> bool:
    """Returns whether the first shape is the second with one more leading axis."""
    return len(shape) == len(one) + 1 and tuple(shape[1:]) == tuple(one)


def conversion(name: str, stored: Shape, is_key: bool, arg: StackedRestoreArgs) -> StackConversion | None:
    """Returns the conversion that a leaf needs, or None if it is stored as it is asked for."""
    asked = arg.asked_shape
    if asked is None or asked == stored or not (is_stacked(stored, asked) or is_stacked(asked, stored)):
        return None
    sharding = arg.sharding
    if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
        raise ValueError(
            f"restore_args(stacked=True): leaf {name}: expected a NamedSharding or SingleDeviceSharding to restore a "
            f"leaf of shape {stored} as {asked}, found {sharding!r}. Give it a sharding in the abstract tree."
        )
    if is_stacked(stored, asked):
        # Orbax truncates to the shape asked for, so only the first row is read; of keys all rows, a few bytes each.
        spec = () if is_key else (None, *_spec(sharding))
        args = _stored_args(arg, (1, *asked), _with_spec(sharding, spec), is_key)
        return StackConversion(args, sharding, asked, stacked_in_checkpoint=True)
    args = _stored_args(arg, stored, _with_spec(sharding, _spec(sharding)[1:]), is_key)
    return StackConversion(args, sharding, asked, stacked_in_checkpoint=False)


def _stored_args(arg: StackedRestoreArgs, shape: Shape, sharding: Any, is_key: bool) -> type_handlers.RestoreArgs:
    """Returns restore args for the leaf as it is stored."""
    kept = {field.name: getattr(arg, field.name) for field in dataclasses.fields(type_handlers.ArrayRestoreArgs)}
    global_shape = None if is_key else shape
    changed = {"sharding": sharding, "global_shape": global_shape, "shape": global_shape, "strict": False}
    return type_handlers.SingleReplicaArrayRestoreArgs(**{**kept, **changed})


def _spec(sharding: Any) -> tuple[Any, ...]:
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()


def _with_spec(sharding: Any, spec: tuple[Any, ...]) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
