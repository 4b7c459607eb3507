"""A mesh as plain data, and the replicas that it holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from orbax_ext import text

_MOST_MESHES = 4  # that a message names


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


def find_axes(mesh: MeshInfo, given: Sequence[str | int]) -> tuple[str, ...] | None:
    """Returns the names of the axes that the user gave by name or index, in the mesh's order; None if it lacks one."""
    names = {_axis_name(mesh, axis) for axis in given}
    return None if None in names else tuple(name for name in mesh.axis_names if name in names)


def meshes_without(meshes: Sequence[MeshInfo], given: Sequence[str | int]) -> list[MeshInfo]:
    """Returns the meshes that lack one of the axes that the user gave."""
    return [mesh for mesh in meshes if find_axes(mesh, given) is None]


def check_axes(meshes: Sequence[MeshInfo], given: Sequence[str | int]) -> None:
    """Raises `ValueError` if no mesh has the axes that the user gave, and one of the meshes spans several processes.

    A tree may have leaves on other meshes beside, and a program may restore something else later, on one device or on
    the devices of one process. What no large mesh has is more likely a mistake.
    """
    lacking = meshes_without(meshes, given)
    if len(lacking) < len(meshes) or not any(len(set(mesh.processes)) > 1 for mesh in meshes):
        return
    wrong = next((axis for axis in given if not any(_axis_name(mesh, axis) for mesh in meshes)), tuple(given))
    names = dict.fromkeys(repr(name) for mesh in meshes for name in mesh.axis_names)
    raise ValueError(
        f"replica axis {wrong!r} is not an axis of {describe(meshes)}. "
        f"Give one of {', '.join(names)}, or an index below {max(len(mesh.axis_names) for mesh in meshes)}."
    )


def describe(meshes: Sequence[MeshInfo]) -> str:
    """Returns for example "the mesh (dp=4, tp=8)" or "the meshes (x=2), (y=1)"."""
    different = list(dict.fromkeys(map(str, meshes)))
    return f"the mesh{'' if len(different) == 1 else 'es'} {text.listing(different, _MOST_MESHES)}"


def _axis_name(mesh: MeshInfo, axis: str | int) -> str | None:
    if isinstance(axis, str):
        return axis if axis in mesh.axis_names else None
    return mesh.axis_names[axis] if -len(mesh.axis_names) <= axis < len(mesh.axis_names) else None


def infer_axes(mesh: MeshInfo, used: Collection[str]) -> tuple[str, ...]:
    """Returns the axes that are not used to shard: everything along them is a copy."""
    return tuple(name for name, size in mesh.sizes.items() if size > 1 and name not in used)
