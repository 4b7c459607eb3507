"""The arrays in a directory: shape, dtype, chunks and the bytes that they take, without reading their data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import tensorstore as ts
from etils import epath

from orbax_ext.plan.holders import StoredChunks
from orbax_ext.storage.checkpoint import metadata
from orbax_ext.storage.checkpoint.metadata import ArrayHeader
from orbax_ext.storage.stall import REQUEST_LIMIT
from orbax_ext.upstream.array_handler import array_context, array_store

_HEADERS = {".zarray": metadata.parse_zarr2, "zarr.json": metadata.parse_zarr3}
_AT_A_TIME = 64  # requests under way at once
_ZARR3_CHUNK = re.compile(r"(.+)/c((?:/\d+)*)")


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array, and what it takes on disk."""

    header: ArrayHeader
    stored_bytes: int  # of its chunks, compressed
    chunks: int  # stored ones; chunks that hold only the fill value may be left out
    zarr3: bool


def stored_arrays(item: epath.Path, ocdbt: bool, sizes: Mapping[str, int]) -> dict[str, StoredArray]:
    """Returns the arrays in a directory by name. `sizes` has its files, among which OCDBT's arrays are not."""
    texts: dict[str, bytes] = {}
    if ocdbt:
        entries = dict(_ocdbt_entries(item))
        texts = {key: value for key, value in entries.items() if isinstance(value, bytes)}
        sizes = {key: len(value) if isinstance(value, bytes) else value for key, value in entries.items()}
    header_keys = [key for key in sizes if "/" in key and key.rpartition("/")[2] in _HEADERS]
    texts |= _read(item, ocdbt, [key for key in header_keys if key not in texts])
    headers: dict[str, tuple[ArrayHeader, bool]] = {}
    for key in header_keys:
        name, _, file = key.rpartition("/")
        headers[name] = _HEADERS[file](texts[key]), file == "zarr.json"
    chunks: dict[str, list[int]] = {name: [] for name in headers}  # their sizes
    for key, size in sizes.items():
        owner = _owner(key, headers)
        if owner is not None and key.rpartition("/")[2] not in _HEADERS:
            chunks[owner].append(size)
    return {
        name: StoredArray(header, sum(chunks[name]), len(chunks[name]), zarr3)
        for name, (header, zarr3) in sorted(headers.items())
    }


def stored_chunks(item: epath.Path) -> dict[str, StoredChunks]:
    """Returns which chunks of each zarr3 array an OCDBT database has, by name of the array. Reads none of them."""
    entries = dict(_ocdbt_entries(item))
    header_keys = [key for key in entries if key.endswith("/zarr.json")]
    texts = {key: value for key in header_keys if isinstance(value := entries[key], bytes)}
    texts |= _read(item, True, [key for key in header_keys if key not in texts])
    present: dict[str, set[tuple[int, ...]]] = {key.removesuffix("/zarr.json"): set() for key in header_keys}
    for key in entries:
        if (chunk := _ZARR3_CHUNK.fullmatch(key)) and chunk[1] in present:
            present[chunk[1]].add(tuple(int(place) for place in chunk[2].split("/")[1:]))
    headers = {name: metadata.parse_zarr3(texts[f"{name}/zarr.json"]) for name in present}
    return {
        name: StoredChunks(header.shape, header.file_chunk, frozenset(present[name]))
        for name, header in headers.items()
    }


def _owner(key: str, names: Container[str]) -> str | None:
    """Returns the array that a key belongs to: its nearest parent that is one. zarr3 nests chunks in directories."""
    while "/" in key:
        key = key.rpartition("/")[0]
        if key in names:
            return key
    return None


def _ocdbt_entries(item: epath.Path) -> Iterator[tuple[str, bytes | int]]:
    """Yields key, and value or the size of a large value, of all in an OCDBT database, from its tree's nodes alone."""
    base = ts.KvStore.open(array_store(item, None, True)["base"], context=array_context(True)).result(
        timeout=REQUEST_LIMIT
    )
    root = ts.ocdbt.dump(base).result(timeout=REQUEST_LIMIT)["versions"][-1]["root"].get("location")
    level = [(b"", root)] if root else []
    while level:
        below: list[tuple[bytes, str]] = []
        for start in range(0, len(level), _AT_A_TIME):
            nodes = [(prefix, ts.ocdbt.dump(base, place)) for prefix, place in level[start : start + _AT_A_TIME]]
            for prefix, node in nodes:
                for entry in node.result(timeout=REQUEST_LIMIT)["entries"]:
                    if "location" in entry:
                        below.append((prefix + entry["subtree_common_prefix"], entry["location"]))
                    else:
                        yield (prefix + entry["key"]).decode(), _value(entry)
        level = below


def _value(entry: Mapping[str, Any]) -> bytes | int:
    if "inline_value" in entry:
        return bytes(entry["inline_value"])
    return int(str(entry["indirect_value"]).rpartition(":")[2])  # "value::d/0308...:offset:length"


def _read(item: epath.Path, ocdbt: bool, keys: list[str]) -> dict[str, bytes]:
    if not keys:
        return {}
    store = ts.KvStore.open(array_store(item, None, ocdbt), context=array_context(ocdbt)).result(timeout=REQUEST_LIMIT)
    slash = "" if store.path.endswith("/") or ocdbt else "/"
    values = {}
    for start in range(0, len(keys), _AT_A_TIME):
        batch = {key: store.read(slash + key) for key in keys[start : start + _AT_A_TIME]}
        values.update({key: bytes(read.result(timeout=REQUEST_LIMIT).value) for key, read in batch.items()})
    return values
