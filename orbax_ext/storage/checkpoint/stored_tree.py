"""What is needed to describe the tree of a checkpoint, in a form that one process can send to the others."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Self

import jax
from etils import epath

from orbax_ext import text as text_lib
from orbax_ext.storage.checkpoint.inspection import items_of
from orbax_ext.storage.checkpoint.items import NotACheckpointError
from orbax_ext.storage.checkpoint.records import CheckpointItem, StoredLeaf
from orbax_ext.storage.filenames import TREE_METADATA
from orbax_ext.upstream.saved_tree import saved_tree

Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class LeafFacts:
    """A leaf that is stored: not an empty node."""

    name: str
    kind: str  # "jax.Array", "np.ndarray", "scalar", "string"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    spec: Spec | None = None  # with which it was saved; None if that is not known
    key_type: str = ""  # of a typed PRNG key

    @classmethod
    def of(cls, leaf: StoredLeaf) -> Self:
        header = leaf.array.header if leaf.array else None
        named = leaf.sharding is not None and leaf.sharding.kind == "NamedSharding"
        return cls(
            leaf.name,
            leaf.kind,
            header.shape if header else (),
            header.dtype if header else "",
            leaf.sharding.spec if leaf.sharding and named else None,
            leaf.key_type,
        )


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """The item with arrays that a path stands for."""

    path: str  # of the item
    structure: str  # the text of its file _METADATA
    leaves: tuple[LeafFacts, ...]

    def names(self) -> Any:
        """Returns the tree as Orbax restores it, with the name of each leaf in its place."""
        return saved_tree(self.structure)

    def to_json(self) -> str:
        return json.dumps([self.path, self.structure, [dataclasses.astuple(leaf) for leaf in self.leaves]])

    @classmethod
    def from_json(cls, text: str) -> Self:
        path, structure, leaves = json.loads(text)
        return cls(path, structure, tuple(map(_leaf_from_json, leaves)))


def read_tree(path: epath.PathLike, step: int | None = None, item: str | None = None) -> StoredTree:
    """Returns the tree at a path: a manager's directory (the given or the newest committed step), a step, or an item.

    Raises `NotACheckpointError`, or `UnfinishedError`, if there is no such tree or more than one.
    """
    found = _choose_item(path, items_of(path, step, sizes_wanted=False), item)
    if lost := [leaf.name for leaf in found.leaves if leaf.problem]:
        raise NotACheckpointError(f"{found.path} is damaged: these arrays are missing: {text_lib.listing(lost)}")
    file = epath.Path(found.path) / TREE_METADATA
    if not file.exists():
        raise NotACheckpointError(f"{found.path} has no file {TREE_METADATA}, so its tree is not known")
    structure = file.read_text()
    stored = set(jax.tree.leaves(saved_tree(structure)))  # the other leaves are empty nodes
    return StoredTree(found.path, structure, tuple(LeafFacts.of(leaf) for leaf in found.leaves if leaf.name in stored))


def _choose_item(path: epath.PathLike, items: list[CheckpointItem], name: str | None) -> CheckpointItem:
    with_arrays = {item.name: item for item in items if item.has_arrays}
    if not with_arrays:
        others = text_lib.listing([item.name for item in items]) or "nothing"
        raise NotACheckpointError(f"{path} holds no arrays; it has {others}")
    names = ", ".join(sorted(with_arrays))
    if name is not None:
        if name not in with_arrays:
            raise NotACheckpointError(f"{path} has no item {name!r} with arrays; it has {names}")
        return with_arrays[name]
    if len(with_arrays) > 1:
        raise NotACheckpointError(f"{path} has several items with arrays: {names}; choose one with item=")
    return next(iter(with_arrays.values()))


def _leaf_from_json(fields: list[Any]) -> LeafFacts:
    name, kind, shape, dtype, spec, key_type = fields
    spec = None if spec is None else tuple(tuple(axes) for axes in spec)
    return LeafFacts(name, kind, tuple(shape), dtype, spec, key_type)
