"""One item of a checkpoint: a tree of arrays, or something else that was saved beside one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping

from etils import epath

from orbax_ext.storage import s3
from orbax_ext.storage.checkpoint import folders, metadata
from orbax_ext.storage.checkpoint.arrays import StoredArray, stored_arrays
from orbax_ext.storage.checkpoint.folders import Folder
from orbax_ext.storage.checkpoint.records import CheckpointItem, CommitState, StoredLeaf
from orbax_ext.storage.filenames import OCDBT_MANIFEST, SHARDINGS, TREE_METADATA

_WRITER = re.compile(r"(?:ocdbt\.)?process_(\d+)")


class NotACheckpointError(ValueError):
    """There is no checkpoint at this path, or its metadata can't be understood."""


def has_arrays(folder: Folder) -> bool:
    return TREE_METADATA in folder.files or OCDBT_MANIFEST in folder.files


def describe_item(folder: Folder, state: CommitState, handler: str, *, sizes_wanted: bool = True) -> CheckpointItem:
    """Returns what is stored in an item's directory. Raises `NotACheckpointError` for damaged metadata.

    Without `sizes_wanted` all sizes on disk are 0: there may be a million files.
    """
    path, below = os.fspath(folder.path), folder.path
    sizes = folders.sizes_below(below) if sizes_wanted else dict.fromkeys(folders.files_below(below), 0)
    ocdbt = OCDBT_MANIFEST in folder.files
    item = CheckpointItem(path, state, handler, sum(sizes.values()), len(sizes))
    if not has_arrays(folder):
        return item
    try:
        tree = metadata.parse_tree(folder.text(TREE_METADATA) or '{"tree_metadata": {}}')
        shardings = metadata.parse_shardings(folder.text(SHARDINGS) or "{}")
        key_types = _key_types(folder, sizes)
    except metadata.DAMAGED as error:
        raise NotACheckpointError(f"the metadata in {path} can't be understood: {error!r}") from error
    if tree.ocdbt and not ocdbt:
        raise NotACheckpointError(
            f"{path} has lost its arrays: {TREE_METADATA} says that they are in an OCDBT database, but "
            f"{OCDBT_MANIFEST} is missing"
        )
    arrays = _arrays(folder.path, ocdbt, sizes)
    leaves = []
    for leaf in tree.leaves:
        name, array = leaf.name, arrays.get(leaf.name)
        lost = leaf.stored and array is None and leaf.kind not in ("string", "bytes")
        problem = "its array is missing" if lost else ""
        leaves.append(StoredLeaf(name, leaf.kind, array, shardings.get(name), key_types.get(name, ""), problem))
    if not leaves:  # old releases did not save the tree
        leaves = [StoredLeaf(name, "array", array, shardings.get(name)) for name, array in arrays.items()]
    zarr3 = any(array.zarr3 for array in arrays.values()) or bool(tree.zarr3)
    return dataclasses.replace(
        item,
        leaves=tuple(leaves),
        has_arrays=True,
        format="zarr3" if zarr3 else "zarr2",
        ocdbt=ocdbt,
        mesh=metadata.most_common_mesh(shardings),
        writers=_writers(sizes),
    )


def _key_types(folder: Folder, files: Iterable[str]) -> dict[str, str]:
    """Returns the types of typed PRNG keys by leaf name.

    Every process that saved wrote a list, possibly thousands of them, all of the same arrays: one is enough.
    """
    lists = sorted((name for name in files if name.startswith("array_metadatas/")), key=lambda name: (len(name), name))
    problem: Exception | None = None
    for name in lists:
        try:
            return metadata.parse_key_types((folder.path / name).read_text())
        except (*metadata.DAMAGED, OSError) as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return {}


def _arrays(path: epath.Path, ocdbt: bool, sizes: Mapping[str, int]) -> dict[str, StoredArray]:
    try:
        return stored_arrays(path, ocdbt, sizes)
    except metadata.DAMAGED as error:  # TensorStore raises ValueError
        better = s3.explain(error, os.fspath(path))
        raise NotACheckpointError(f"the arrays of {path} can't be listed: {str(better).splitlines()[0]}") from None


def _writers(sizes: Mapping[str, int]) -> int | None:
    """Returns how many processes wrote, from the directories that they have left; None if there are none."""
    numbers = {match[1] for name in sizes for part in name.split("/")[:2] if (match := _WRITER.fullmatch(part))}
    return len(numbers) or None
