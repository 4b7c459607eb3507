"""Host data to global arrays: every process from what it has, on its own devices."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_ext.placement import agree, pieces, specs


def replicate(tree: Any, mesh: Mesh, *, check: bool = False, memory_kind: str | None = None) -> Any:
    """The tree's arrays on every device of the mesh, from each process's own copy. Other leaves pass through.

    With `check`, all processes of the job compare digests first, and a ValueError names who differs, and where.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"replicate: expected a jax.sharding.Mesh of devices, found {type(mesh).__name__}.")
    target = NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)
    return _put("replicate", tree, [target] * len(jax.tree.leaves(tree)), check)


def shard(tree: Any, shardings: Any, *, check: bool = False) -> Any:
    """The tree's arrays with these shardings, from each process's own whole copy. Other leaves pass through.

    `shardings` has the structure of the tree or is a prefix of it, such as one sharding for all leaves; anything
    with a `.sharding` will do. `check` is as in `replicate`.
    """
    return _put("shard", tree, targets("shard", tree, shardings), check)


def stitch(tree: Any, shardings: Any, *, check: bool = False) -> Any:
    """Global arrays from the parts that the processes hold: each brings what belongs on its own devices.

    A part is as large as the process's devices need, in the order of the global array. Shardings as in `shard`;
    a `jax.ShapeDtypeStruct` with a sharding also says what global shape and dtype to expect. With `check`, all
    processes compare the global shapes that follow from their parts.
    """
    expected = broadcast("stitch", tree, shardings)
    shares = [
        _Share(name, leaf, like) if pieces.is_array(leaf) else None
        for (name, leaf), like in zip(pieces.named_leaves(tree), expected, strict=True)
    ]
    if check:
        agree.require_same("stitch", [share.signature() for share in shares if share])
    return pieces.map_named(lambda name, leaf, share: share.stitched() if share else leaf, tree, shares)


def targets(what: str, tree: Any, shardings: Any) -> list[Sharding]:
    """A sharding for each leaf of the tree, in order; of leaves that are no arrays it may be anything."""
    found = []
    for (name, leaf), like in zip(pieces.named_leaves(tree), broadcast(what, tree, shardings), strict=True):
        target = sharding_of(like)
        if target is None and pieces.is_array(leaf):
            raise ValueError(f"{what}: leaf {name}: expected a Sharding or something that has one, found {like!r}.")
        found.append(target)
    return found


def sharding_of(like: Any) -> Any:
    """The sharding that a Sharding, an array, a ShapeDtypeStruct or a Format speaks of, or None."""
    return like if isinstance(like, Sharding) else getattr(like, "sharding", None)


def broadcast(what: str, tree: Any, shardings: Any) -> list[Any]:
    """What the prefix `shardings` says of each leaf of the tree; None stands for all leaves below it."""
    found: list[Any] = []

    def add(like: Any, subtree: Any) -> None:
        found.extend([like] * jax.tree.structure(subtree).num_leaves)

    try:
        jax.tree.map(add, shardings, tree, is_leaf=lambda node: node is None)
        return found
    except ValueError as error:
        raise ValueError(
            f"{what}: expected shardings with the structure of the tree, or a prefix of it such as a single "
            f"sharding; found another structure: {error}"
        ) from error


def _put(what: str, tree: Any, shardings: list[Any], check: bool) -> Any:
    if check:
        ours = {device.process_index for sharding in shardings if sharding for device in sharding.device_set}
        named = [(name, leaf) for name, leaf in pieces.named_leaves(tree) if pieces.is_array(leaf)]
        concerned = not ours or jax.process_index() in ours
        agree.require_same(what, (agree.described(what, name, leaf) for name, leaf in named), concerned)

    def put(name: str, leaf: Any, sharding: Any) -> Any:
        return pieces.place(what, name, leaf, sharding) if pieces.is_array(leaf) else leaf

    return pieces.map_named(put, tree, shardings)


class _Share:
    """One process's part of one leaf, and where it goes."""

    def __init__(self, name: str, leaf: Any, like: Any) -> None:
        pieces.refuse_tracer("stitch", name, leaf)
        sharding = sharding_of(like)
        if sharding is None:
            raise ValueError(f"stitch: leaf {name}: expected a Sharding or something that has one, found {like!r}.")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"stitch: leaf {name}: expected this process's own part, found an array that is already spread over "
                f"several processes: {leaf.sharding}. To change its sharding use match_sharding."
            )
        self._name, self._sharding, self._leaf = name, sharding, leaf
        self._key_impl = jax.random.key_impl(leaf) if pieces.is_key(leaf) else None
        self._data = np.asarray(leaf if self._key_impl is None else jax.random.key_data(leaf))
        pieces.fit_or_raise("stitch", name, (sharding.num_devices,) * self._data.ndim, sharding)
        self._grid = specs.LocalGrid.of(sharding, self._data.ndim)
        self._shape = self._global_shape(like)

    def signature(self) -> agree.Item:
        text = f"global shape {self._shape}, dtype {self._data.dtype} (local shape {self._data.shape})"
        return agree.Item(self._name, text, agree.digest(f"{self._shape} {self._data.dtype}".encode()))

    def stitched(self) -> jax.Array:
        local = self._data.shape
        tiles = [self._data[self._grid.piece(device, local)] for device in self._grid.by_device]
        dtype = pieces.dtype_on_device(self._data)
        joined = pieces.assemble(self._shape, dtype, self._sharding, tiles)
        return joined if self._key_impl is None else jax.random.wrap_key_data(joined, impl=self._key_impl)

    def _global_shape(self, like: Any) -> specs.Shape:
        if not self._grid.by_device:
            self._complain("none of this process's devices is in the sharding; leave the leaf out here")
        if not self._grid.is_box:
            self._complain("the tiles on this process's devices do not form one box; order the mesh by process")
        found = tuple(self._leaf.shape)
        if isinstance(like, jax.ShapeDtypeStruct):
            shape = tuple(like.shape) + self._data.shape[len(found) :]
            expected = self._grid.local_shape(shape)
            if self._data.shape != expected:
                self._complain(
                    f"expected the local shape {expected[: len(found)]}, this process's part of the global shape "
                    f"{like.shape} under {self._sharding}, found {found}"
                )
            if like.dtype != self._leaf.dtype:
                self._complain(f"expected the dtype {like.dtype}, found {self._leaf.dtype}")
            return shape
        inferred = self._grid.global_shape(self._data.shape)
        if inferred is None:
            counts = tuple(len(held) for held in self._grid.held)[: len(found)]
            self._complain(
                f"expected a local shape that is a multiple of {counts}, the tiles that its devices hold under "
                f"{self._sharding}, found {found}"
            )
        return inferred

    def _complain(self, problem: str) -> NoReturn:
        raise ValueError(
            f"stitch: leaf {self._name} on process {jax.process_index()} ({socket.gethostname()}): {problem}."
        )
