"""Parses the JSON metadata of a checkpoint: tree, shardings, key types, the arrays' own headers. Pure.

These formats are the same in every supported release; fields that later releases have added are ignored.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  makes bfloat16 and similar dtypes known to numpy by name
import numpy as np

DAMAGED = (ValueError, KeyError, TypeError, AttributeError)  # what these functions raise for damaged files


@dataclasses.dataclass(frozen=True)
class TreeLeaf:
    """A leaf in the metadata of a tree."""

    path: tuple[str, ...]
    kind: str  # "jax.Array", "np.ndarray", "scalar", "string"; "None", "Dict"... if it is an empty node
    stored: bool  # whether there is data for it

    @property
    def name(self) -> str:
        """The name under which its array is stored."""
        return ".".join(self.path)


@dataclasses.dataclass(frozen=True)
class SavedTree:
    """The tree that was saved, and the format of its arrays."""

    leaves: tuple[TreeLeaf, ...]
    ocdbt: bool | None  # None where it is not recorded
    zarr3: bool | None
    every_chunk: bool = False  # whether chunks that hold only the fill value are stored, too


def parse_tree(text: str) -> SavedTree:
    """Parses the file _METADATA."""
    content = json.loads(text)
    leaves = []
    for entry in content["tree_metadata"].values():
        value = entry["value_metadata"]
        path = tuple(str(key["key"]) for key in entry["key_metadata"])
        leaves.append(TreeLeaf(path, str(value["value_type"]), not value.get("skip_deserialize", False)))
    every_chunk = bool(content.get("store_array_data_equal_to_fill_value", False))
    return SavedTree(tuple(leaves), content.get("use_ocdbt"), content.get("use_zarr3"), every_chunk)


@dataclasses.dataclass(frozen=True)
class SavedSharding:
    """The sharding that an array had when it was saved."""

    kind: str  # "NamedSharding", "SingleDeviceSharding"...
    axes: tuple[tuple[str, int], ...] = ()  # the mesh: (name, size)
    spec: tuple[tuple[str, ...], ...] = ()  # for each dimension, as far as given, its mesh axes

    def __str__(self) -> str:
        if self.kind != "NamedSharding":
            return self.kind
        return "P(" + ", ".join(_entry(entry) for entry in self.spec) + ")"


def parse_shardings(text: str) -> dict[str, SavedSharding]:
    """Parses the file _sharding; returns shardings by array name."""
    shardings = {}
    for encoded, description in json.loads(text).items():
        sharding = json.loads(description)
        axes = zip(sharding.get("axis_names") or (), sharding.get("shape") or (), strict=False)
        shardings[base64.b64decode(encoded).decode()] = SavedSharding(
            str(sharding.get("sharding_type", "unknown")),
            tuple((str(name), int(size)) for name, size in axes),
            tuple(_axes(entry) for entry in sharding.get("partition_spec") or ()),
        )
    return shardings


def parse_key_types(text: str) -> dict[str, str]:
    """Parses a file of array_metadatas; returns the implementation of each typed PRNG key by array name."""
    key_types = {}
    for entry in json.loads(text)["array_metadatas"]:
        metadata = entry["array_metadata"]
        kind = (metadata.get("ext_metadata") or {}).get("random_key_impl")
        if kind:
            key_types[str(metadata["param_name"])] = str(kind)
    return key_types


@dataclasses.dataclass(frozen=True)
class ArrayHeader:
    """The content of an array's own metadata file."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    chunk: tuple[int, ...]  # the least that can be read
    file_chunk: tuple[int, ...]  # the content of one stored object: one chunk, or several in zarr3

    @property
    def logical_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def parse_zarr2(text: str | bytes) -> ArrayHeader:
    """Parses the file .zarray."""
    content = json.loads(text)
    chunk = _numbers(content["chunks"])
    return _header(content["shape"], content["dtype"], chunk, chunk)


def parse_zarr3(text: str | bytes) -> ArrayHeader:
    """Parses the file zarr.json."""
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
    """Returns the mesh on which most arrays were saved; empty if none is recorded."""
    counts = collections.Counter(sharding.axes for sharding in shardings.values() if sharding.axes)
    return max(counts, key=lambda axes: counts[axes], default=())
