"""The leaves that Orbax asks the handler for, as plain data, with what the restore args leave open looked up."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.storage import array_metadata
from orbax_ext.upstream import runtime
from orbax_ext.upstream.array_handler import Format, SavedArray, ShardingMetadata, saved_arrays
from orbax_ext.upstream.stored_arrays import checkpoint_of

_OTHER_SHARDING = "its sharding is a "


@dataclasses.dataclass(frozen=True)
class LeafRequest:
    """One leaf: Orbax's description of it, and what it comes to."""

    info: Any  # Orbax's ParamInfo
    arg: Any  # Orbax's RestoreArgs
    leaf: Leaf
    sharding: Any = None  # a NamedSharding unless leaf.direct_because says otherwise

    @property
    def is_plain(self) -> bool:
        """Whether it can't travel for no other reason than the kind of its sharding."""
        return self.leaf.direct_because.startswith(_OTHER_SHARDING)


@dataclasses.dataclass(frozen=True)
class Request:
    """All leaves of a restore, and the meshes that they name."""

    leaf_requests: tuple[LeafRequest, ...]
    meshes: tuple[Mesh, ...]
    mesh_infos: tuple[MeshInfo, ...]

    @functools.cached_property  # used once for each leaf here and there
    def leaves(self) -> list[Leaf]:
        return [request.leaf for request in self.leaf_requests]

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint: its step and item. Not its whole path, since hosts may mount it elsewhere."""
        directory = checkpoint_of(self.leaf_requests[0].info)
        return "" if directory is None else "/".join(pathlib.PurePath(os.fspath(directory)).parts[-2:])

    @property
    def device_bytes(self) -> int:
        """Bytes that the leaves that can travel take on one device."""
        return sum(leaf.block_bytes for leaf in self.leaves)

    @property
    def concerns_all_processes(self) -> bool:
        """Whether a leaf lies on all processes of a job of several: then one process can't go on without the others."""
        processes = set(range(jax.process_count()))
        return len(processes) > 1 and any(set(mesh.processes) == processes for mesh in self.mesh_infos)


def may_concern_all_processes(args: Sequence[Any]) -> bool:
    """Returns whether a leaf lies on all processes, or may do so because its sharding has to be looked up."""
    processes = set(range(jax.process_count()))
    try:
        shardings = [_given_sharding(arg) for arg in args]
    except Exception:  # it is what the restore fails with
        return True
    meshes = {sharding.mesh for sharding in shardings if isinstance(getattr(sharding, "mesh", None), Mesh)}
    return None in shardings or any(
        {device.process_index for device in mesh.devices.flat} == processes for mesh in meshes
    )


async def make_request(handler: type_handlers.ArrayHandler, infos: Sequence[Any], args: Sequence[Any]) -> Request:
    """Returns the request for these leaves.

    What the restore args leave open is looked up in the sharding file, the stored arrays' metadata and key types.
    """
    # An error of one process is one of all where they meet, so each looks at some of what plain Orbax reads everywhere.
    share = slice(jax.process_index(), None, jax.process_count()) if may_concern_all_processes(args) else slice(None)
    saved = await saved_arrays(handler, infos[0].parent_dir, share)
    shardings = [_given_sharding(arg) for arg in args]
    incomplete = [
        index
        for index, (info, arg, sharding) in enumerate(zip(infos, args, shardings, strict=True))
        if not _is_key(saved.get(info.name)) and (sharding is None or _shape(arg) is None or _dtype(arg) is None)
    ]
    stored = await _look_up(handler, infos, [index for index in incomplete if shardings[index] is not None], False)
    stored |= await _look_up(handler, infos, [index for index in incomplete if shardings[index] is None], True)
    meshes: dict[Mesh, int] = {}
    leaf_requests = []
    kinds: dict[Any, Leaf] = {}
    for index, (info, arg) in enumerate(zip(infos, args, strict=True)):
        sharding = shardings[index]
        if sharding is None and index in stored:
            sharding = _stored_sharding(stored[index])
        found = stored.get(index), saved.get(info.name)
        leaf_requests.append(_leaf_request(info, arg, sharding, *found, meshes, kinds))
    return Request(tuple(leaf_requests), tuple(meshes), tuple(mesh_lib.describe(mesh) for mesh in meshes))


async def _look_up(
    handler: type_handlers.ArrayHandler, infos: Sequence[Any], indices: Sequence[int], shardings: bool
) -> dict[int, Any]:
    if not indices:
        return {}
    metadata = await array_metadata.read(handler, [infos[index] for index in indices], shardings=shardings)
    return dict(zip(indices, metadata, strict=True))


def given_request(infos: Sequence[Any], args: Sequence[Any]) -> Request:
    """Returns the request for leaves of which the restore args say all, without a look into a checkpoint."""
    meshes: dict[Mesh, int] = {}
    kinds: dict[Any, Leaf] = {}
    leaf_requests = tuple(
        _leaf_request(info, arg, _given_sharding(arg), None, None, meshes, kinds)
        for info, arg in zip(infos, args, strict=True)
    )
    return Request(leaf_requests, tuple(meshes), tuple(mesh_lib.describe(mesh) for mesh in meshes))


def _leaf_request(
    info: Any,
    arg: Any,
    sharding: Any,
    stored: Any,
    saved: SavedArray | None,
    meshes: dict[Mesh, int],
    kinds: dict[Any, Leaf],
) -> LeafRequest:
    """Returns the request for a leaf. `meshes` and `kinds` have what was found out about others: most are equal."""
    shape: Any = _shape(arg) if _shape(arg) is not None else getattr(stored, "shape", None)
    dtype: Any = _dtype(arg) if _dtype(arg) is not None else getattr(stored, "dtype", None)
    chunk = saved.chunk if saved is not None else getattr(stored, "chunk", None)
    strict = bool(getattr(arg, "strict", True))
    # Shardings by identity: they are those of the args, and to compare them takes longer than all the rest.
    kind = id(sharding), None if shape is None else tuple(shape), dtype, chunk, strict, _is_key(saved)
    if kind not in kinds:
        kinds[kind] = _leaf(sharding, shape, dtype, chunk, strict, _is_key(saved), meshes)
    return LeafRequest(info, arg, kinds[kind].named(info.name), sharding)


def _leaf(
    sharding: Any, shape: Any, dtype: Any, chunk: Any, strict: bool, is_key: bool, meshes: dict[Mesh, int]
) -> Leaf:
    """Returns a leaf without its name."""
    reason = _why_direct(sharding, shape, dtype, is_key)
    if reason:
        return Leaf("", tuple(shape or ()), str(dtype), direct_because=reason)
    shape = tuple(int(size) for size in shape)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return Leaf(
        "",
        shape,
        dtype.name,
        dtype.itemsize,
        sharding.shard_shape(shape),
        mesh=meshes.setdefault(sharding.mesh, len(meshes)),
        spec=mesh_lib.normalized_spec(sharding.spec, len(shape)),
        chunk=chunk,
        divisible=chunk is not None and strict and runtime.bits(dtype) >= 8,
    )


def _why_direct(sharding: Any, shape: Any, dtype: Any, is_key: bool) -> str:
    if is_key or (dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)):
        return "it is a typed PRNG key"
    if isinstance(sharding, Format):
        return "a memory layout is asked for"
    if not isinstance(sharding, NamedSharding):
        return f"{_OTHER_SHARDING}{type(sharding).__name__}, not a NamedSharding"
    if not isinstance(sharding.mesh, Mesh):
        return "its mesh has no devices"
    if shape is None or dtype is None:
        return "its shape or dtype is not known"
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError:
        return "its shape does not divide over its mesh"  # a direct read raises Orbax's own error
    return ""


def _is_key(saved: SavedArray | None) -> bool:
    return saved is not None and bool(saved.key_impl)


def _given_sharding(arg: Any) -> Any:
    """Returns the sharding that the restore args name, by Orbax's rules of precedence."""
    mesh, axes = getattr(arg, "mesh", None), getattr(arg, "mesh_axes", None)
    if mesh is not None and axes is not None:
        return NamedSharding(mesh, axes)
    sharding = getattr(arg, "sharding", None)
    if isinstance(sharding, ShardingMetadata):
        return sharding.to_jax_sharding()
    return sharding


def _stored_sharding(stored: Any) -> Sharding | None:
    """Returns the sharding that the array was saved with, if this job has its devices."""
    sharding = getattr(stored, "sharding", None)
    try:
        return None if sharding is None else sharding.to_jax_sharding()
    except ValueError:  # another topology: a direct read raises Orbax's own error
        return None


def _shape(arg: Any) -> tuple[int, ...] | None:
    return getattr(arg, "global_shape", None)


def _dtype(arg: Any) -> np.dtype | None:
    return getattr(arg, "dtype", None)
