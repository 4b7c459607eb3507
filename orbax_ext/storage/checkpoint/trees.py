"""The JSON files of a checkpoint, understood: tree, shardings, the arrays' own metadata. Pure.

These formats are the same in every supported release; what later ones have added is ignored.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 and its like by name from here on
import numpy as np


@dataclasses.dataclass(frozen=True)
class TreeLeaf:
    """A leaf as the tree's metadata has it."""

    path: tuple[str, ...]
    kind: str  # "jax.Array", "np.ndarray", "scalar", "string", or of an empty node "None", "Dict"...
    stored: bool  # whether there is data for it

    @property
    def name(self) -> str:
        """The name under which its array is stored."""
        return ".".join(self.path)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The tree that was saved, and how."""

    leaves: tuple[TreeLeaf, ...]
    in_database: bool | None  # whether OCDBT was used; None where that is not recorded
    zarr3: bool | None


def parse_tree(text: str) -> Tree:
    """The file _METADATA."""
    content = json.loads(text)
    leaves = []
    for entry in content["tree_metadata"].values():
        value = entry["value_metadata"]
        path = tuple(str(key["key"]) for key in entry["key_metadata"])
        leaves.append(TreeLeaf(path, str(value["value_type"]), not value.get("skip_deserialize", False)))
    return Tree(tuple(leaves), content.get("use_ocdbt"), content.get("use_zarr3"))


@dataclasses.dataclass(frozen=True)
class SavedSharding:
    """The sharding that an array had when it was saved."""

    kind: str  # "NamedSharding", "SingleDeviceSharding"...
    axes: tuple[tuple[str, int], ...] = ()  # the mesh: (name, size)
    spec: tuple[tuple[str, ...], ...] = ()  # for each dimension, as far as given, the axes that it is sharded over

    @property
    def mesh(self) -> str:
        return "(" + ", ".join(f"{name}={size}" for name, size in self.axes) + ")"

    def __str__(self) -> str:
        if self.kind != "NamedSharding":
            return self.kind
        return "P(" + ", ".join(_entry(entry) for entry in self.spec) + ")"


def parse_shardings(text: str) -> dict[str, SavedSharding]:
    """The file _sharding, by array name."""
    found = {}
    for encoded, description in json.loads(text).items():
        sharding = json.loads(description)
        axes = zip(sharding.get("axis_names") or (), sharding.get("shape") or (), strict=False)
        found[base64.b64decode(encoded).decode()] = SavedSharding(
            str(sharding.get("sharding_type", "unknown")),
            tuple((str(name), int(size)) for name, size in axes),
            tuple(_axes(entry) for entry in sharding.get("partition_spec") or ()),
        )
    return found


def parse_key_types(text: str) -> dict[str, str]:
    """A file in array_metadatas: of the typed PRNG keys among the arrays, the implementation."""
    found = {}
    for entry in json.loads(text)["array_metadatas"]:
        metadata = entry["array_metadata"]
        kind = (metadata.get("ext_metadata") or {}).get("random_key_impl")
        if kind:
            found[str(metadata["param_name"])] = str(kind)
    return found


@dataclasses.dataclass(frozen=True)
class ArrayHeader:
    """What an array's own metadata file says."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    chunk: tuple[int, ...]  # what one read takes at least
    file_chunk: tuple[int, ...]  # what one stored object holds: the same, or several of them in zarr3

    @property
    def logical_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def parse_zarr2(text: str | bytes) -> ArrayHeader:
    """The file .zarray."""
    content = json.loads(text)
    chunk = _numbers(content["chunks"])
    return _header(content["shape"], content["dtype"], chunk, chunk)


def parse_zarr3(text: str | bytes) -> ArrayHeader:
    """The file zarr.json."""
    content = json.loads(text)
    outer = _numbers(content["chunk_grid"]["configuration"]["chunk_shape"])
    inner = outer
    for codec in content.get("codecs", ()):
        if codec["name"] == "sharding_indexed":
            inner = _numbers(codec["configuration"]["chunk_shape"])
    return _header(content["shape"], content["data_type"], inner, outer)


def _header(shape: Any, dtype: Any, chunk: tuple[int, ...], file_chunk: tuple[int, ...]) -> ArrayHeader:
    try:
        known = np.dtype(dtype)
    except TypeError:
        return ArrayHeader(_numbers(shape), str(dtype), 1, chunk, file_chunk)
    return ArrayHeader(_numbers(shape), known.name, known.itemsize, chunk, file_chunk)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(str(axis) for axis in entry)


def _entry(axes: tuple[str, ...]) -> str:
    if not axes:
        return "None"
    return axes[0] if len(axes) == 1 else "(" + ", ".join(axes) + ")"


def most_common_mesh(shardings: Mapping[str, SavedSharding]) -> tuple[tuple[str, int], ...]:
    """The mesh that most arrays were saved on; empty if none is recorded."""
    counts: dict[tuple[tuple[str, int], ...], int] = {}
    for sharding in shardings.values():
        if sharding.axes:
            counts[sharding.axes] = counts.get(sharding.axes, 0) + 1
    return max(counts, key=lambda axes: counts[axes], default=())
