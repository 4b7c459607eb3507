"""Files with the digests of a checkpoint's arrays: where they are, and how they are computed.

A hidden file beside the checkpoint's own directory holds them, so that nothing in the checkpoint changes and no listing
of steps shows them. It names its checkpoint by `identity`: another one saved later under the same name does not match.
Each version of digests has a file name of its own, so that no version of orbax_ext compares with what it can't compute.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from orbax_ext.storage.checkpoint import digests
from orbax_ext.storage.filenames import OCDBT_MANIFEST, STEP_METADATA, TREE_METADATA
from orbax_ext.storage.stall import REQUEST_LIMIT
from orbax_ext.upstream.array_handler import array_context, array_store

_SUFFIXES = {2: "orbax_ext_digests_2.json", 1: "orbax_ext_digests.json"}  # by version of the digests, newest first
_SLAB = 64 << 20  # bytes that are read at a time
_MAX_FILE = 1 << 28  # bytes: enough for more than a million leaves

LeafDigests = Mapping[str, Mapping[str, Any]]  # by name: shape, dtype, digest


@dataclasses.dataclass(frozen=True)
class StoredDigests:
    """What is stored beside a checkpoint."""

    version: int
    leaves: LeafDigests


def path_for(item: epath.PathLike, version: int = digests.CURRENT) -> epath.Path:
    """Returns the path of the digest file of a directory of arrays."""
    item = epath.Path(item)
    step = item.parent
    if not (item / STEP_METADATA).exists() and (step / STEP_METADATA).exists():
        return step.parent / f".{step.name}.{item.name}.{_SUFFIXES[version]}"
    return item.parent / f".{item.name}.{_SUFFIXES[version]}"


def existing_path(item: epath.PathLike) -> epath.Path | None:
    """Returns the path of the newest digest file, whatever it holds; None if there is none."""
    return next((path for version in _SUFFIXES if (path := path_for(item, version)).exists()), None)


def load(item: epath.PathLike) -> StoredDigests | None:
    """Returns the newest digests stored beside a checkpoint, or None if there are none of this checkpoint."""
    for version in _SUFFIXES:
        path = path_for(item, version)
        if path.exists() and path.stat().length <= _MAX_FILE:
            content = json.loads(path.read_text())
            if content["checkpoint"] == identity(item):
                return StoredDigests(version, content["leaves"])
    return None


def write(item: epath.PathLike, leaves: LeafDigests) -> epath.Path:
    """Writes the digest file and returns its path."""
    path = path_for(item)
    path.write_text(json.dumps({"checkpoint": identity(item), "leaves": dict(leaves)}, indent=1))
    return path


def identity(item: epath.PathLike) -> str:
    """Returns a hash that differs between two checkpoints of the same name."""
    item = epath.Path(item)
    manifest = item / OCDBT_MANIFEST
    if manifest.exists():
        return _hash(manifest.read_bytes())
    # The description of the tree may be the same for every step; that of the step says when it was saved.
    step = item if (item / STEP_METADATA).exists() else item.parent
    when = (step / STEP_METADATA).read_bytes() if (step / STEP_METADATA).exists() else b""
    return _hash((item / TREE_METADATA).read_bytes() + when)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def compute(item: epath.PathLike, version: int = digests.CURRENT) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields name and digest of each stored array; if an array can't be read, the reason instead of the digest."""
    item = epath.Path(item)
    ocdbt = (item / OCDBT_MANIFEST).exists()
    store = ts.KvStore.open(array_store(item, None, ocdbt), context=array_context(ocdbt)).result(timeout=REQUEST_LIMIT)
    for key in sorted(store.list().result(timeout=REQUEST_LIMIT)):
        name, _, file = key.decode().strip("/").rpartition("/")
        driver = {".zarray": "zarr", "zarr.json": "zarr3"}.get(file)
        if driver and name:
            yield name, _digest_of(item, name, driver, ocdbt, version)


def digest_of(item: epath.PathLike, name: str, version: int) -> dict[str, Any] | str:
    """Returns the digest of one zarr3 array of an OCDBT database; if it can't be read, the reason."""
    return _digest_of(epath.Path(item), name, "zarr3", ocdbt=True, version=version)


def _digest_of(item: epath.Path, name: str, driver: str, ocdbt: bool, version: int) -> dict[str, Any] | str:
    try:
        spec = {"driver": driver, "kvstore": array_store(item, name, ocdbt)}
        array = ts.open(spec, open=True, read=True, context=array_context(ocdbt)).result(timeout=REQUEST_LIMIT)
        total = digests.add(digests.of_block(slab, starts, array.shape, version) for starts, slab in _slabs(array))
    except ValueError as error:  # TensorStore raises it for a damaged or truncated chunk
        return str(error)
    return {"shape": list(array.shape), "dtype": array.dtype.numpy_dtype.name, "digest": digests.to_text(total)}


def _slabs(array: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields starts and content of slabs along the first dimension, each of whole chunks."""
    if array.ndim == 0:
        yield (), np.asarray(array.read().result(timeout=REQUEST_LIMIT))
        return
    row = max(1, int(np.prod(array.shape[1:])) * array.dtype.numpy_dtype.itemsize)
    chunk = array.chunk_layout.read_chunk.shape[0]
    rows = max(chunk, _SLAB // row // chunk * chunk)
    for start in range(0, array.shape[0], rows):
        piece = array[start : min(start + rows, array.shape[0])]
        yield (start, *[0] * (array.ndim - 1)), np.asarray(piece.read().result(timeout=REQUEST_LIMIT))
