"""Digests kept beside a checkpoint: where they are, and how they are made from what is stored.

They live in a hidden file next to the checkpoint's own directory, so that nothing in the checkpoint changes and no
listing of steps sees them. The file says which checkpoint it is about: one saved again under the same name is another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from orbax_ext.storage.checkpoint import digests
from orbax_ext.upstream.array_handler import array_context, array_store

_SUFFIX = "orbax_ext_digests.json"
_CHECKPOINT_MARK = "_CHECKPOINT_METADATA"
_SLAB = 64 << 20  # bytes that are read at a time
_MAX_FILE = 1 << 28

Leaves = Mapping[str, Mapping[str, Any]]  # by name: shape, dtype, digest


def path_for(item: epath.PathLike) -> epath.Path:
    """Where the digests of a directory of arrays are kept."""
    item = epath.Path(item)
    if not (item / _CHECKPOINT_MARK).exists() and (item.parent / _CHECKPOINT_MARK).exists():
        step = item.parent
        return step.parent / f".{step.name}.{item.name}.{_SUFFIX}"
    return item.parent / f".{item.name}.{_SUFFIX}"


def load(item: epath.PathLike) -> Leaves | None:
    """The digests stored beside a checkpoint, or None if there are none that are about it."""
    path = path_for(item)
    if not path.exists() or path.stat().length > _MAX_FILE:
        return None
    content = json.loads(path.read_text())
    return content["leaves"] if content["checkpoint"] == identity(item) else None


def write(item: epath.PathLike, leaves: Leaves) -> epath.Path:
    path = path_for(item)
    path.write_text(json.dumps({"checkpoint": identity(item), "leaves": dict(leaves)}, indent=1))
    return path


def identity(item: epath.PathLike) -> str:
    """Tells apart two checkpoints of the same name."""
    item = epath.Path(item)
    manifest = item / "manifest.ocdbt"
    return hashlib.sha256((manifest if manifest.exists() else item / "_METADATA").read_bytes()).hexdigest()[:32]


def compute(item: epath.PathLike) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Name and digest of each stored array, one after the other; of one that can't be read, the reason."""
    item = epath.Path(item)
    in_database = (item / "manifest.ocdbt").exists()
    context = array_context(in_database)
    store = ts.KvStore.open(array_store(item, None, in_database), context=context).result()
    for key in sorted(store.list().result()):
        name, _, file = key.decode().strip("/").rpartition("/")
        driver = {".zarray": "zarr", "zarr.json": "zarr3"}.get(file)
        if driver and name:
            yield name, _digest_of(item, name, driver, in_database)


def _digest_of(item: epath.Path, name: str, driver: str, in_database: bool) -> dict[str, Any] | str:
    try:
        spec = {"driver": driver, "kvstore": array_store(item, name, in_database)}
        array = ts.open(spec, open=True, read=True, context=array_context(in_database)).result()
        total = digests.add(digests.of_block(slab, starts, array.shape) for starts, slab in _slabs(array))
    except ValueError as error:  # TensorStore's word for a chunk that is damaged or cut short
        return str(error)
    return {"shape": list(array.shape), "dtype": array.dtype.numpy_dtype.name, "digest": digests.to_text(total)}


def _slabs(array: Any) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The array in pieces along its first dimension, each of whole chunks."""
    if array.ndim == 0:
        yield (), np.asarray(array.read().result())
        return
    row = max(1, int(np.prod(array.shape[1:])) * array.dtype.numpy_dtype.itemsize)
    chunk = array.chunk_layout.read_chunk.shape[0]
    rows = max(chunk, _SLAB // row // chunk * chunk)
    for start in range(0, array.shape[0], rows):
        piece = array[start : min(start + rows, array.shape[0])]
        yield (start, *[0] * (array.ndim - 1)), np.asarray(piece.read().result())
