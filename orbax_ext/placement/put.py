"""Makes global arrays from host data: every process puts its own data on its own devices."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_ext.placement import agree, pieces, specs


def replicate(tree: Any, mesh: Mesh, *, check: bool = False, memory_kind: str | None = None) -> Any:
    """Returns the tree's arrays on every device of the mesh, from each process's own copy. Other leaves are kept.

    With `check`, all processes of the job compare digests first; a ValueError names the processes and leaves that
    differ.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"replicate: expected a jax.sharding.Mesh of devices, found {type(mesh).__name__}.")
    target = NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)
    return _put("replicate", tree, [target] * len(jax.tree.leaves(tree)), check)


def shard(tree: Any, shardings: Any, *, check: bool = False) -> Any:
    """Returns the tree's arrays with these shardings, from each process's own whole copy. Other leaves are kept.

    `shardings` has the structure of the tree or is a prefix of it, such as one sharding for all leaves; objects with a
    `.sharding` also serve. `check` is as in `replicate`.
    """
    return _put("shard", tree, targets("shard", tree, shardings), check)


def stitch(tree: Any, shardings: Any, *, check: bool = False) -> Any:
    """Returns global arrays made of the parts that the processes hold.

    A process's part is what its own devices hold, in the order of the global array. Shardings are as in `shard`; a
    `jax.ShapeDtypeStruct` with a sharding also gives the expected global shape and dtype. With `check`, all processes
    compare the global shapes that follow from their parts.
    """
    expected = broadcast("stitch", tree, shardings)
    parts = [
        _LocalPart(name, leaf, like) if pieces.is_array(leaf) else None
        for (name, leaf), like in zip(pieces.named_leaves(tree), expected, strict=True)
    ]
    if check:
        agree.require_same("stitch", [part.fingerprint() for part in parts if part])
    return pieces.map_named(lambda name, leaf, part: part.stitched() if part else leaf, tree, parts)


def targets(caller: str, tree: Any, shardings: Any) -> list[Sharding]:
    """Returns the sharding of each leaf of the tree, in order; leaves that are not arrays may have none."""
    shardings_by_leaf = []
    for (name, leaf), like in zip(pieces.named_leaves(tree), broadcast(caller, tree, shardings), strict=True):
        target = sharding_of(like)
        if target is None and pieces.is_array(leaf):
            raise ValueError(f"{caller}: leaf {name}: expected a Sharding or something that has one, found {like!r}.")
        shardings_by_leaf.append(target)
    return shardings_by_leaf


def sharding_of(like: Any) -> Any:
    """Returns the sharding of a Sharding, an array, a ShapeDtypeStruct or a Format, or None."""
    return like if isinstance(like, Sharding) else getattr(like, "sharding", None)


def broadcast(caller: str, tree: Any, shardings: Any) -> list[Any]:
    """Returns the entry of the prefix `shardings` for each leaf of the tree; a None stands for all leaves below it."""
    entries: list[Any] = []

    def add(like: Any, subtree: Any) -> None:
        entries.extend([like] * jax.tree.structure(subtree).num_leaves)

    try:
        jax.tree.map(add, shardings, tree, is_leaf=lambda node: node is None)
        return entries
    except ValueError as error:
        raise ValueError(
            f"{caller}: expected shardings with the structure of the tree, or a prefix of it such as a single "
            f"sharding; found another structure: {error}"
        ) from error


def _put(caller: str, tree: Any, shardings: list[Any], check: bool) -> Any:
    if check:
        processes = {device.process_index for sharding in shardings if sharding for device in sharding.device_set}
        takes_part = not processes or jax.process_index() in processes
        arrays = [(name, leaf) for name, leaf in pieces.named_leaves(tree) if pieces.is_array(leaf)]
        agree.require_same(caller, (agree.fingerprint(caller, name, leaf) for name, leaf in arrays), takes_part)

    def put(name: str, leaf: Any, sharding: Any) -> Any:
        return pieces.place(caller, name, leaf, sharding) if pieces.is_array(leaf) else leaf

    return pieces.map_named(put, tree, shardings)


class _LocalPart:
    """The part of one leaf that this process has, and its place in the global array."""

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
        pieces.require_fit("stitch", name, (sharding.num_devices,) * self._data.ndim, sharding)
        self._grid = specs.LocalGrid.of(sharding, self._data.ndim)
        self._shape = self._global_shape(like)

    def fingerprint(self) -> agree.LeafFingerprint:
        description = f"global shape {self._shape}, dtype {self._data.dtype} (local shape {self._data.shape})"
        digest = agree.digest(f"{self._shape} {self._data.dtype}".encode())
        return agree.LeafFingerprint(self._name, description, digest)

    def stitched(self) -> jax.Array:
        local = self._data.shape
        tiles = [self._data[self._grid.piece(device, local)] for device in self._grid.by_device]
        dtype = pieces.dtype_on_device(self._data)
        joined = pieces.assemble(self._shape, dtype, self._sharding, tiles)
        return joined if self._key_impl is None else jax.random.wrap_key_data(joined, impl=self._key_impl)

    def _global_shape(self, like: Any) -> specs.Shape:
        if not self._grid.by_device:
            self._fail("none of this process's devices is in the sharding; leave the leaf out here")
        if not self._grid.is_box:
            self._fail("the tiles on this process's devices do not form one box; order the mesh by process")
        return self._given_shape(like) if isinstance(like, jax.ShapeDtypeStruct) else self._inferred_shape()

    def _given_shape(self, like: jax.ShapeDtypeStruct) -> specs.Shape:
        local = tuple(self._leaf.shape)
        shape: specs.Shape = tuple(like.shape) + self._data.shape[len(local) :]
        expected = self._grid.local_shape(shape)
        if self._data.shape != expected:
            self._fail(
                f"expected the local shape {expected[: len(local)]}, this process's part of the global shape "
                f"{like.shape} under {self._sharding}, found {local}"
            )
        if like.dtype != self._leaf.dtype:
            self._fail(f"expected the dtype {like.dtype}, found {self._leaf.dtype}")
        return shape

    def _inferred_shape(self) -> specs.Shape:
        shape = self._grid.global_shape(self._data.shape)
        if shape is None:
            local = tuple(self._leaf.shape)
            counts = tuple(len(held) for held in self._grid.held)[: len(local)]
            self._fail(
                f"expected a local shape that is a multiple of {counts}, the tiles that its devices hold under "
                f"{self._sharding}, found {local}"
            )
        return shape

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(
            f"stitch: leaf {self._name} on process {jax.process_index()} ({socket.gethostname()}): {problem}."
        )
