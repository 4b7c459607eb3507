"""An index in memory of some arrays of a database, with small nodes.

Orbax lets a database keep its whole index in one node. TensorStore adds up the sizes of all chunks in a node each time
it looks one up there, so four times as many small arrays take sixteen times as long. To copy the entries of the arrays
that are read takes a microsecond each. The copies refer to the same data files; no chunk is copied.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore

_ENOUGH = 100  # arrays that are worth an index
_IN_MEMORY = ".orbax_ext_index/"  # how the names of files begin that are in memory
_NODE = 16 << 10  # bytes
_numbers = itertools.count()

Store = Mapping[str, Any]  # TensorStore's spec of a database, as JSON


def ranges(names: Sequence[str], numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Returns the ranges of keys that hold arrays: one for each run of consecutive numbers."""
    places = sorted(range(len(names)), key=numbers.__getitem__)
    runs = itertools.groupby(enumerate(places), lambda pair: numbers[pair[1]] - pair[0])
    found = [[f"{names[place]}/" for _, place in run] for _, run in runs]
    return [(min(run), f"{max(run)[:-1]}0") for run in found]  # "0" is the character after the slash


async def indexed(store: Store, names: Sequence[str], numbers: Sequence[int], context: Any) -> Store | None:
    """Returns the database with an index of only these arrays; None if that is not worth it, or not possible.

    `numbers` are the places of the arrays in the checkpoint: those that follow each other are likely to do so in the
    index, too.
    """
    if len(names) < _ENOUGH or context is None or store.get("driver") != "ocdbt":
        return None
    try:
        base = dict(tensorstore.KvStore.Spec(store["base"]).to_json())
        base["path"] = f"{base.get('path', '').rstrip('/')}/"
        memory = f"memory://orbax_ext/{next(_numbers)}/"
        both = {"driver": "kvstack", "layers": [{"base": base}, {"prefix": _IN_MEMORY, "base": memory}]}
        whole = {"manifest": base, **store, "base": both}
        copied = {
            **store,
            "base": both,
            "manifest": memory,
            "config": {"max_decoded_node_bytes": _NODE},
            **{f"{kind}_data_prefix": _IN_MEMORY for kind in ("btree_node", "version_tree_node", "value")},
        }
        source = await tensorstore.KvStore.open(whole, context=context)
        target = await tensorstore.KvStore.open(copied, context=context)
        keys = [tensorstore.KvStore.KeyRange(first, end) for first, end in ranges(names, numbers)]
        await asyncio.gather(*(source.experimental_copy_range_to(target, some) for some in keys))
    except Exception:  # the arrays are opened without it, which raises what is wrong
        return None
    return copied


def without_index(store: Store) -> Store:
    """Returns the database that an index was made of; any other is returned as it is."""
    base = store.get("base")
    if not isinstance(base, Mapping) or base.get("driver") != "kvstack":
        return store
    added = ("manifest", "config", "btree_node_data_prefix", "version_tree_node_data_prefix", "value_data_prefix")
    kept = {name: value for name, value in store.items() if name not in added}
    return {**kept, "base": base["layers"][0]["base"]}
