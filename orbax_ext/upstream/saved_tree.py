"""The tree of a checkpoint as Orbax restores it without a description: its containers, and its empty nodes."""

from __future__ import annotations

import json
from typing import Any

import jax
from orbax.checkpoint._src.metadata import empty_values, tree
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions
from orbax.checkpoint._src.metadata.value_metadata_entry import ValueMetadataEntry

_RICH = PyTreeMetadataOptions(support_rich_types=True)
_PLAIN = PyTreeMetadataOptions(support_rich_types=False)


def saved_tree(text: str) -> Any:
    """Returns the tree that the file _METADATA describes: a name for each stored leaf, and empty nodes as they are.

    Tuples and named tuples are there if the checkpoint was saved with `support_rich_types`. By default Orbax saves them
    as lists and dicts. The 0.11 releases save the rich types but refuse to restore them; with this tree as the item of
    a restore they are restored nevertheless.
    """
    content = json.loads(text)
    nested = tree.InternalTreeMetadata.from_json(content, pytree_metadata_options=_RICH).as_nested_tree()
    options = _RICH
    # Some releases have written trees with other things at the leaves, which Orbax itself then ignores.
    if not all(isinstance(leaf, ValueMetadataEntry) for leaf in jax.tree.leaves(nested)):
        nested = tree.InternalTreeMetadata.from_json(content, pytree_metadata_options=_PLAIN).as_nested_tree()
        options = _PLAIN

    def name_or_empty(path: Any, entry: ValueMetadataEntry) -> Any:
        if entry.skip_deserialize and empty_values.is_empty_typestr(entry.value_type):
            return empty_values.get_empty_value_from_typestr(entry.value_type, options)
        return jax.tree_util.keystr(path, simple=True, separator=".")

    return jax.tree_util.tree_map_with_path(name_or_empty, nested)
