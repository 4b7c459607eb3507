"""The arrays that a directory stores: shape, dtype, chunks and the bytes that they take, without reading them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts
from etils import epath

from orbax_ext.storage.checkpoint import trees
from orbax_ext.storage.checkpoint.trees import ArrayHeader
from orbax_ext.upstream.array_handler import array_context, array_store

_HEADERS = {".zarray": trees.parse_zarr2, "zarr.json": trees.parse_zarr3}
_AT_A_TIME = 64  # requests under way at once


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array, and what it takes on disk."""

    header: ArrayHeader
    stored_bytes: int  # its chunks, as compressed
    chunks: int  # stored ones; chunks that hold only the fill value may be left out
    zarr3: bool


def stored_arrays(item: epath.Path, in_database: bool, sizes: Mapping[str, int]) -> dict[str, StoredArray]:
    """By name, the arrays in a directory. `sizes` has its files; arrays in a database (OCDBT) are not among them."""
    if in_database:
        entries = dict(_database_entries(item))
        sizes = {key: len(value) if isinstance(value, bytes) else value for key, value in entries.items()}
        known = {key: value for key, value in entries.items() if isinstance(value, bytes)}
    else:
        known = {}
    headers = [key for key in sizes if "/" in key and key.rpartition("/")[2] in _HEADERS]
    texts = _read(item, in_database, [key for key in headers if key not in known])
    by_name: dict[str, tuple[ArrayHeader, bool]] = {}
    for key in headers:
        name, _, file = key.rpartition("/")
        by_name[name] = _HEADERS[file](known.get(key) or texts[key]), file == "zarr.json"
    totals = {name: [0, 0] for name in by_name}
    for key, size in sizes.items():
        owner = _owner(key, totals)
        if owner is not None and key.rpartition("/")[2] not in _HEADERS:
            totals[owner][0] += size
            totals[owner][1] += 1
    return {
        name: StoredArray(header, totals[name][0], totals[name][1], zarr3)
        for name, (header, zarr3) in sorted(by_name.items())
    }


def _owner(key: str, names: Mapping[str, Any]) -> str | None:
    """The array that a key belongs to: the nearest of its parents that is one. zarr3 nests chunks in directories."""
    while "/" in key:
        key = key.rpartition("/")[0]
        if key in names:
            return key
    return None


def _database_entries(item: epath.Path) -> Iterator[tuple[str, bytes | int]]:
    """(key, value or its size) for everything in an OCDBT database, from the nodes of its tree alone.

    Small values are kept in the nodes; of large ones the nodes have place and length.
    """
    base = ts.KvStore.open(array_store(item, None, True)["base"], context=array_context(True)).result()
    manifest = ts.ocdbt.dump(base).result()
    root = manifest["versions"][-1]["root"].get("location")
    level = [(b"", root)] if root else []
    while level:
        below: list[tuple[bytes, str]] = []
        for start in range(0, len(level), _AT_A_TIME):
            nodes = [(prefix, ts.ocdbt.dump(base, place)) for prefix, place in level[start : start + _AT_A_TIME]]
            for prefix, node in nodes:
                for entry in node.result()["entries"]:
                    if "location" in entry:
                        below.append((prefix + entry["subtree_common_prefix"], entry["location"]))
                    else:
                        yield (prefix + entry["key"]).decode(), _value(entry)
        level = below


def _value(entry: Mapping[str, Any]) -> bytes | int:
    if "inline_value" in entry:
        return bytes(entry["inline_value"])
    return int(str(entry["indirect_value"]).rpartition(":")[2])  # "value::d/0308...:offset:length"


def _read(item: epath.Path, in_database: bool, keys: list[str]) -> dict[str, bytes]:
    if not keys:
        return {}
    spec, context = array_store(item, None, in_database), array_context(in_database)
    store = ts.KvStore.open(spec, context=context).result()
    slash = "" if store.path.endswith("/") or in_database else "/"
    found = {}
    for start in range(0, len(keys), _AT_A_TIME):
        batch = {key: store.read(slash + key) for key in keys[start : start + _AT_A_TIME]}
        found.update({key: bytes(read.result().value) for key, read in batch.items()})
    return found
