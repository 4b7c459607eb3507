"""Partition specs, and which part of an array belongs to which device. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Index = tuple[slice, ...]
Shape = tuple[int, ...]


def canonical_spec(sharding: Sharding) -> PartitionSpec:
    """Returns the spec without mesh axes of size 1 and trailing Nones: equal for shardings that differ in spelling."""
    if isinstance(sharding, SingleDeviceSharding):
        return PartitionSpec()
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"canonical_spec: expected a NamedSharding, found {type(sharding).__name__}. "
            "Of an array, pass its .sharding; other kinds of sharding have no spec."
        )
    return _filtered(sharding.spec, lambda axis: sharding.mesh.shape[axis] > 1)


def split_by_axis_type(sharding: NamedSharding) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the spec's explicit axes and its auto axes, as two specs.

    Raises ValueError where an auto axis stands before an explicit one on the same dimension: JAX always puts
    the explicit axes first, so the two specs together would not mean the same.
    """
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    for entry in sharding.spec:
        kinds = [types[axis] is AxisType.Explicit for axis in axes_of(entry)]
        if kinds != sorted(kinds, reverse=True):
            raise ValueError(
                f"the spec {sharding.spec} has an auto axis before an explicit one on the same dimension ({entry}), "
                "which JAX can't express inside jit. Call match_sharding outside of jit, or swap the two axes."
            )
    explicit = _filtered(sharding.spec, lambda axis: types[axis] is AxisType.Explicit)
    auto = _filtered(sharding.spec, lambda axis: types[axis] is not AxisType.Explicit)
    return explicit, auto


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Returns the mesh axes that one entry of a spec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _filtered(spec: PartitionSpec, keep: Callable[[Any], bool]) -> PartitionSpec:
    entries: list[Any] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
            continue
        kept = tuple(axis for axis in axes_of(entry) if keep(axis))
        entries.append(None if not kept else kept[0] if len(kept) == 1 else kept)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def box(index: Index, shape: Shape) -> tuple[tuple[int, int], ...]:
    """Returns an index as (start, stop) pairs: equal for slices that mean the same."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


@dataclasses.dataclass(frozen=True)
class LocalGrid:
    """The tiles of a sharded array that this process has, whatever the array's size."""

    tiles: Shape  # the number of tiles along each dimension
    held: tuple[tuple[int, ...], ...]  # for each dimension, the numbers of the tiles held here
    by_device: Mapping[Any, tuple[int, ...]]  # the tile of each of this process's devices

    @classmethod
    def of(cls, sharding: Sharding, ndim: int) -> LocalGrid:
        # The number of devices is a multiple of every dimension's tiling, so a cube of that size can be cut evenly.
        cube = (sharding.num_devices,) * ndim
        tiles = tuple(side // tile for side, tile in zip(cube, sharding.shard_shape(cube), strict=True))
        indices = sharding.addressable_devices_indices_map(tiles)
        by_device = {device: tuple(start for start, _ in box(index, tiles)) for device, index in indices.items()}
        held = tuple(tuple(sorted({tile[axis] for tile in by_device.values()})) for axis in range(ndim))
        return cls(tiles, held, by_device)

    @property
    def is_box(self) -> bool:
        """Whether the tiles held here form one array."""
        return set(self.by_device.values()) == set(itertools.product(*self.held))

    def local_shape(self, shape: Shape) -> Shape:
        """Returns the shape of this process's part of an array of this global shape."""
        return tuple(size // n * len(held) for size, n, held in zip(shape, self.tiles, self.held, strict=True))

    def global_shape(self, local: Sequence[int]) -> Shape | None:
        """Returns the global shape of a local part, or None if the part is not a multiple of the tiles held here."""
        if any(size % len(held) for size, held in zip(local, self.held, strict=True)):
            return None
        return tuple(size // len(held) * n for size, n, held in zip(local, self.tiles, self.held, strict=True))

    def piece(self, device: Any, local: Sequence[int]) -> Index:
        """Returns the index of a device's tile in the local array."""
        starts = [held.index(number) for held, number in zip(self.held, self.by_device[device], strict=True)]
        sizes = [size // len(held) for size, held in zip(local, self.held, strict=True)]
        return tuple(slice(at * size, (at + 1) * size) for at, size in zip(starts, sizes, strict=True))
