"""What a check restores, and the mesh and specs that it restores onto. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from orbax_ext import text as text_lib
from orbax_ext.options import Strategy
from orbax_ext.plan.forecast import described, notation
from orbax_ext.storage import checkpoint

Specs = Mapping[str, notation.Spec]  # by name, of the leaves that are restored as arrays on devices


@dataclasses.dataclass(frozen=True)
class CheckRequest:
    """What `orbax-ext check` is asked to restore, and how."""

    path: str
    step: int | None = None
    mesh: notation.Axes | None = None
    rules: tuple[notation.Rule, ...] = ()
    timeout: float = 600.0
    strategy: Strategy = "auto"


def choose_mesh(
    request: CheckRequest, item: checkpoint.CheckpointItem, devices: int, processes: int
) -> tuple[notation.Axes, str]:
    """Returns the axes of the mesh for a job with this many devices, and where the axes come from.

    Raises `ValueError` if the request's mesh has another number of devices.
    """
    if request.mesh is not None:
        wanted = math.prod(size for _, size in request.mesh)
        if wanted != devices:
            raise ValueError(
                f"--mesh {text_lib.mesh(dict(request.mesh))} has {text_lib.count(wanted, 'device')}, but this job has "
                f"{devices:,} on {text_lib.count(processes, 'process')}"
            )
        return request.mesh, "--mesh"
    if item.mesh and math.prod(size for _, size in item.mesh) == devices:
        return item.mesh, "the checkpoint, which was saved on it"
    source = "the number of devices: every device gets a copy of everything (--mesh and --spec change that)"
    return (("replica", devices),), source


def choose_specs(
    request: CheckRequest, item: checkpoint.CheckpointItem, mesh: Mapping[str, int]
) -> tuple[Specs, list[str]]:
    """Returns the specs, and the names of the leaves that are sharded less than saved, as the mesh requires it.

    Raises `ValueError` if a rule of the request does not fit a leaf.
    """
    specs: dict[str, notation.Spec] = {}
    unfit: list[str] = []
    for leaf in item.leaves:
        if leaf.array is None or leaf.kind not in ("jax.Array", "array"):
            continue
        saved = leaf.sharding.spec if leaf.sharding else ()
        spec, reason = described.choose_spec(leaf.name, leaf.array.header.shape, saved, request.rules, mesh)
        if reason:
            unfit.append(leaf.name)
        specs[leaf.name] = () if leaf.key_type else spec
    return specs, unfit


def sharded_shares(item: checkpoint.CheckpointItem, specs: Specs) -> dict[str, float]:
    """Returns, by mesh axis, the share of the bytes that is sharded over it."""
    sizes = {leaf.name: leaf.array.header.logical_bytes for leaf in item.leaves if leaf.array and leaf.name in specs}
    total = sum(sizes.values()) or 1
    shares: dict[str, float] = {}
    for name, spec in specs.items():
        for axis in {axis for axes in spec for axis in axes}:
            shares[axis] = shares.get(axis, 0.0) + sizes[name] / total
    return shares


def bytes_per_device(item: checkpoint.CheckpointItem, specs: Specs, mesh: Mapping[str, int]) -> int:
    """Returns the bytes that the restored arrays take on each device."""
    return sum(
        math.prod(notation.block_shape(specs[leaf.name], leaf.array.header.shape, mesh)) * leaf.array.header.itemsize
        for leaf in item.leaves
        if leaf.array and leaf.name in specs
    )
