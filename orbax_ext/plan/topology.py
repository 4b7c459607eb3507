"""A mesh as plain data, and the replicas that it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from orbax_ext import text


@dataclasses.dataclass(frozen=True)
class MeshInfo:
    """The axes of a mesh and the process that owns each of its devices (in row-major order)."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    processes: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def replicas(self, axes: Collection[str]) -> int:
        """Returns how many replicas the given axes make."""
        return math.prod(self.sizes[axis] for axis in axes)

    def devices(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the devices, by their place in the mesh, as a table with a row for each position along the axes."""
        first = [self.axis_names.index(axis) for axis in axes]
        rest = [index for index in range(len(self.axis_names)) if index not in first]
        by_axis = np.arange(len(self.processes)).reshape(self.axis_sizes)
        return by_axis.transpose([*first, *rest]).reshape(self.replicas(axes), -1)

    def owners(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the processes that own the devices of `devices(axes)`."""
        return np.array(self.processes)[self.devices(axes)]

    def crosses_processes(self, axes: Sequence[str]) -> bool:
        """Returns whether the copies along the given axes are on more than one process."""
        table = self.owners(axes)
        return bool(np.any(table.min(axis=0) != table.max(axis=0)))

    def __str__(self) -> str:
        return text.mesh(self.sizes)


def resolve_axes(mesh: MeshInfo, given: Sequence[str | int]) -> tuple[str, ...]:
    """Returns the names of the axes that the user gave by name or index, in the mesh's order."""
    names = set()
    for axis in given:
        if isinstance(axis, str) and axis in mesh.axis_names:
            names.add(axis)
        elif isinstance(axis, int) and -len(mesh.axis_names) <= axis < len(mesh.axis_names):
            names.add(mesh.axis_names[axis])
        else:
            raise ValueError(
                f"replica axis {axis!r} is not an axis of the mesh {mesh}. "
                f"Give one of {', '.join(map(repr, mesh.axis_names))}, or an index below {len(mesh.axis_names)}."
            )
    return tuple(name for name in mesh.axis_names if name in names)


def infer_axes(mesh: MeshInfo, used: Collection[str]) -> tuple[str, ...]:
    """Returns the axes that are not used to shard: everything along them is a copy."""
    return tuple(name for name, size in mesh.sizes.items() if size > 1 and name not in used)
