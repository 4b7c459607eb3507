"""The tree that was saved as one item: whether it is the one that is asked for, and how its arrays are stored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from absl import logging
from etils import epath

from orbax_ext import text
from orbax_ext.redact import redact
from orbax_ext.storage.checkpoint import metadata
from orbax_ext.storage.checkpoint.metadata import SavedTree
from orbax_ext.storage.filenames import OCDBT_MANIFEST, STEP_METADATA, TREE_METADATA


@dataclasses.dataclass(frozen=True)
class ArrayFormat:
    """How the arrays of an item are stored. The defaults are what Orbax's emergency manager writes."""

    ocdbt: bool = True
    zarr3: bool = True
    every_chunk: bool = True  # also chunks that hold only the fill value: one that is not there has been lost


def read_tree(item: epath.Path) -> SavedTree | None:
    """Returns the tree that was saved; None, with a log line, where its file can't be read."""
    try:
        return metadata.parse_tree((item / TREE_METADATA).read_text())
    except (OSError, *metadata.DAMAGED) as error:
        logging.warning(
            "orbax_ext: %s can't be read, so it is not checked that %s has the leaves that are asked for: %s",
            TREE_METADATA,
            item,
            redact(repr(error)),
        )
        return None


def save_time(item: epath.Path) -> float | None:
    """Returns when the save of an item's step began, in seconds; None if that is not known."""
    try:
        return int(json.loads((item.parent / STEP_METADATA).read_text())["init_timestamp_nsecs"]) / 1e9
    except (OSError, *metadata.DAMAGED):
        return None


def array_format(item: epath.Path, tree: SavedTree | None) -> ArrayFormat:
    """Returns how an item's arrays are stored, with Orbax's own defaults for what its tree does not say."""
    if tree is None:
        return ArrayFormat()
    ocdbt = (item / OCDBT_MANIFEST).exists() if tree.ocdbt is None else tree.ocdbt
    return ArrayFormat(bool(ocdbt), bool(tree.zarr3), tree.every_chunk)


def difference(tree: SavedTree | None, names: Sequence[str]) -> str:
    """Returns how the leaves of a tree differ from those that are asked for, empty if they do not."""
    if tree is None:
        return ""
    saved = {leaf.name for leaf in tree.leaves if leaf.stored}
    lacking, more = [name for name in names if name not in saved], sorted(saved.difference(names))
    parts = [f"lacks {text.listing(lacking)}"] * bool(lacking) + [f"also has {text.listing(more)}"] * bool(more)
    return " and ".join(parts)
