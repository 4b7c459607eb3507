"""One item of a checkpoint: a tree of arrays, or something else that was saved beside one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from etils import epath

from orbax_ext.storage import s3
from orbax_ext.storage.checkpoint import folders, trees
from orbax_ext.storage.checkpoint.arrays import StoredArray, stored_arrays
from orbax_ext.storage.checkpoint.errors import NotACheckpointError
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.records import Item, Leaf, State
from orbax_ext.storage.checkpoint.trees import SavedSharding

TREE = "_METADATA"
_SHARDINGS = "_sharding"
_DATABASE = "manifest.ocdbt"
_WRITER = re.compile(r"(?:ocdbt\.)?process_(\d+)")


def is_item(folder: Folder) -> bool:
    return TREE in folder.files or _DATABASE in folder.files


def describe(folder: Folder, state: State, handler: str) -> Item:
    path = os.fspath(folder.path)
    sizes = folders.sizes_below(folder.path)
    in_database = _DATABASE in folder.files
    plain = Item(path, state, handler, sum(sizes.values()), len(sizes), format="files")
    if not is_item(folder):
        return plain
    try:
        tree = trees.parse_tree(folder.text(TREE) or '{"tree_metadata": {}}')
        shardings = trees.parse_shardings(folder.text(_SHARDINGS) or "{}")
        key_types: dict[str, str] = {}
        for name in sizes:
            if name.startswith("array_metadatas/"):
                key_types.update(trees.parse_key_types((folder.path / name).read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise NotACheckpointError(f"the metadata in {path} can't be understood: {error!r}") from error
    if tree.in_database and not in_database:
        raise NotACheckpointError(
            f"{path} has lost its arrays: {TREE} says that they are in an OCDBT database, but {_DATABASE} is missing"
        )
    arrays = _arrays(folder.path, in_database, sizes)
    leaves = [_leaf(leaf, arrays, shardings, key_types) for leaf in tree.leaves]
    if not leaves:  # of a release that did not write the tree down
        leaves = [Leaf(name, "array", array, shardings.get(name)) for name, array in arrays.items()]
    zarr3 = any(array.zarr3 for array in arrays.values()) or bool(tree.zarr3)
    return dataclasses.replace(
        plain,
        leaves=tuple(leaves),
        has_arrays=True,
        format="zarr3" if zarr3 else "zarr2",
        in_database=in_database,
        mesh=trees.most_common_mesh(shardings),
        writers=_writers(sizes),
    )


def _leaf(
    leaf: trees.TreeLeaf,
    arrays: Mapping[str, StoredArray],
    shardings: Mapping[str, SavedSharding],
    key_types: Mapping[str, str],
) -> Leaf:
    array = arrays.get(leaf.name)
    lost = leaf.stored and array is None and leaf.kind not in ("string", "bytes")
    problem = "its array is missing" if lost else ""
    return Leaf(leaf.name, leaf.kind, array, shardings.get(leaf.name), key_types.get(leaf.name, ""), problem)


def _arrays(path: epath.Path, in_database: bool, sizes: Mapping[str, int]) -> dict[str, StoredArray]:
    try:
        return stored_arrays(path, in_database, sizes)
    except (ValueError, KeyError) as error:  # TensorStore's word for what is damaged is ValueError
        better = s3.explain(error, os.fspath(path))
        raise NotACheckpointError(f"the arrays of {path} can't be listed: {str(better).splitlines()[0]}") from None


def _writers(sizes: Mapping[str, int]) -> int | None:
    found = {match[1] for name in sizes for part in name.split("/")[:2] if (match := _WRITER.fullmatch(part))}
    return len(found) or None
