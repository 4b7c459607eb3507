"""What a process reads ahead of a restore, in the units in which it is read and taken."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from orbax_ext import mesh as mesh_lib
from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest
from orbax_ext.transfer.blocks import Block
from orbax_ext.transfer.boxes import ReadItem, UsedMemory, fetched_bytes
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.held_blocks import HeldBlocks, PlannedShare, Unit

_BATCH_BYTES = 64 << 20  # of leaves that are read directly: so many are read at a time


def place_for(share: PlannedShare, limit: float, *, whole_groups: bool) -> HeldBlocks:
    """Returns a place for a share, and for groups that then need not travel if there may be any.

    `limit`: seconds for a program, of which this runs none.
    """
    executor = Executor(share.handler, share.request, share.plan.leaves, limit)
    # A pack's leaves are copied into its vector when they are taken: the vector belongs to the exchange.
    groups = [_unit(executor.items(group)) for group in share.plan.groups]
    units = [*groups, *map(_unit, _batches(_direct_items(share)))]
    wholes = [_unit(executor.direct.items(group.leaves)) for group in share.plan.groups] if whole_groups else []
    return HeldBlocks(share, units, functools.partial(executor.compile_now, share.plan.groups), wholes)


def _unit(items: Sequence[ReadItem]) -> Unit:
    """Returns the unit of those items that can be read just as they are stored. All others are left to the restore."""
    sizes = [fetched_bytes(item) for item in items]
    return Unit(tuple(item for item, size in zip(items, sizes, strict=True) if size), sum(sizes))


def _direct_items(share: PlannedShare) -> Iterator[ReadItem]:
    """Yields the leaves that are read directly and need no conversion by Orbax: each with what this process holds."""
    for index in share.plan.direct:
        request = share.request.leaf_requests[index]
        leaf, sharding = request.leaf, request.sharding
        if leaf.mesh is not None:
            block = Block(leaf.block, jnp.dtype(leaf.dtype))
            here = mesh_lib.replica_sharding(sharding, sharding.mesh)
            yield ReadItem(index, request, leaf, here, block, memory=UsedMemory())
        elif isinstance(sharding, SingleDeviceSharding) and (whole := _on_one_device(request)) is not None:
            yield ReadItem(index, *whole, memory=UsedMemory())


def _on_one_device(request: LeafRequest) -> tuple[LeafRequest, Leaf, SingleDeviceSharding, Block] | None:
    """Returns the rest of the item of a leaf on one device; None if it has to be read by Orbax."""
    arg, leaf = request.arg, request.leaf
    known = getattr(arg, "global_shape", None) is not None and getattr(arg, "dtype", None) is not None
    if not known or not request.is_plain or not request.sharding.addressable_devices:
        return None
    dtype = jax.dtypes.canonicalize_dtype(arg.dtype)
    here = SingleDeviceSharding(next(iter(request.sharding.device_set)))
    return request, dataclasses.replace(leaf, itemsize=dtype.itemsize), here, Block(leaf.shape, dtype)


def _batches(items: Iterator[ReadItem]) -> Iterator[list[ReadItem]]:
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += fetched_bytes(item)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
