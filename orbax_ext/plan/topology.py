"""A mesh as plain data, and the replicas that it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np


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
        """How many replicas the given axes make."""
        return math.prod(self.sizes[axis] for axis in axes)

    def owners(self, axes: Sequence[str]) -> np.ndarray:
        """The processes of all devices, as a table with a row for each place along the given axes."""
        first = [self.axis_names.index(axis) for axis in axes]
        rest = [at for at in range(len(self.axis_names)) if at not in first]
        by_axis = np.array(self.processes).reshape(self.axis_sizes)
        return by_axis.transpose([*first, *rest]).reshape(math.prod(self.axis_sizes[at] for at in first), -1)

    def crosses_processes(self, axes: Sequence[str]) -> bool:
        """Whether the copies along the given axes are on more than one process."""
        table = self.owners(axes)
        return bool(np.any(table.min(axis=0) != table.max(axis=0)))

    def __str__(self) -> str:
        return "(" + ", ".join(f"{name}={size}" for name, size in self.sizes.items()) + ")"


def resolve_axes(mesh: MeshInfo, given: Sequence[str | int]) -> tuple[str, ...]:
    """Axis names for the names or indices that the user gave, in the mesh's order."""
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
    """The axes that no leaf is sharded over: everything along them is a copy."""
    return tuple(name for name, size in mesh.sizes.items() if size > 1 and name not in used)
