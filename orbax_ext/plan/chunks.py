"""The stored chunks that the devices of a mesh read, in bytes by process.

Reading part of a chunk reads all of it, once in each process. The bytes are exact where the blocks of each process form
a grid, as those of neighbours on a mesh do, and an estimate elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo


@dataclasses.dataclass(frozen=True)
class ChunkedArray:
    """A stored array, and how the devices that read it cut each of its dimensions."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes that cut it
    itemsize: int

    @classmethod
    def of(cls, leaf: Leaf, splits: Sequence[tuple[str, int]] = ()) -> ChunkedArray:
        """Describes a leaf that is cut by its spec and by further (axis, dimension) pairs."""
        chunk = leaf.chunk if leaf.chunk and len(leaf.chunk) == len(leaf.shape) else leaf.block
        cuts = [*leaf.spec, *((),) * (len(leaf.shape) - len(leaf.spec))]
        for axis, dim in splits:
            cuts[dim] = (*cuts[dim], axis)
        return cls(leaf.shape, tuple(max(1, size) for size in chunk), tuple(cuts), leaf.itemsize)


class ChunkReads:
    """Counts what the processes of one mesh read."""

    def __init__(self, mesh: MeshInfo) -> None:
        self._owner = np.array(mesh.processes, dtype=np.int64)
        self._sizes = mesh.sizes
        grid = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), -1)
        self._position = dict(zip(mesh.axis_names, grid, strict=True))  # axis: each device's position along it
        self._devices = functools.cache(mesh.devices)  # by replica axes

    def count(
        self, array: ChunkedArray, axes: tuple[str, ...], replica: int | None, lanes: tuple[str, ...]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the processes that read, the bytes of the chunks that each touches, and the bytes that each needs.

        The devices of one replica along `axes` read, or all devices if `replica` is None. Along `lanes`, each position
        reads another array of the same kind.
        """
        devices = self._devices(()).ravel() if replica is None else self._devices(axes)[replica]
        owners = self._owner[devices]
        processes = np.unique(owners)
        read, needed = np.ones(len(processes)), np.ones(len(processes))
        block, block_size = np.zeros(len(devices), dtype=np.int64), 1
        # Lanes are one more dimension, cut into chunks of one array.
        lane_count = math.prod(self._sizes[axis] for axis in lanes)
        for size, chunk, cut in [*zip(array.shape, array.chunk, array.cuts, strict=True), (lane_count, 1, lanes)]:
            piece, pieces = self._pieces(devices, cut)
            block, block_size = block * pieces + piece, block_size * (size // pieces)
            touched, length = _touched(size, chunk, pieces, owners, piece, processes)
            read *= touched
            needed *= length
        # The sides of a grid of blocks were multiplied. Where the blocks of a process are no grid, that is too much.
        blocks = int(block.max(initial=0)) + 1
        held = np.unique(owners * blocks + block) // blocks
        exact = np.bincount(np.searchsorted(processes, held), minlength=len(processes)) * block_size
        factor = np.divide(exact, needed, out=np.ones(len(processes)), where=needed > 0)
        return processes, read * factor * array.itemsize, exact.astype(float) * array.itemsize

    def _pieces(self, devices: np.ndarray, axes: Sequence[str]) -> tuple[np.ndarray, int]:
        """Returns which of the pieces that some axes make each device has, and how many pieces there are."""
        piece, pieces = np.zeros(len(devices), dtype=np.int64), 1
        for axis in axes:
            piece = piece * self._sizes[axis] + self._position[axis][devices]
            pieces *= self._sizes[axis]
        return piece, pieces


def _touched(
    size: int, chunk: int, pieces: int, owners: np.ndarray, piece: np.ndarray, processes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns by process, for one dimension, the elements of the chunks that its pieces touch, and of the pieces."""
    width = size // pieces
    held = np.unique(owners * pieces + piece)
    process, place = np.searchsorted(processes, held // pieces), held % pieces
    first, last = place * width // chunk, -(-(place + 1) * width // chunk)
    same = np.concatenate([[False], process[1:] == process[:-1]])
    before = np.where(same, np.concatenate([[0], last[:-1]]), 0)
    begin = np.maximum(first, before)
    touched = np.maximum(0, np.minimum(last * chunk, size) - np.minimum(begin * chunk, size))
    pieces_held = np.bincount(process, minlength=len(processes))
    return np.bincount(process, touched, len(processes)), pieces_held * width
