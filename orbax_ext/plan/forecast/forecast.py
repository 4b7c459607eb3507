"""What a restore would do on a cluster, strategy by strategy: bytes by process, seconds, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_ext.options import Options, Strategy
from orbax_ext.plan import cost, memory, volumes
from orbax_ext.plan.boundary import Ends, Progress, best_boundary, bytes_of_groups
from orbax_ext.plan.choose import choose_plan
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import RestorePlan, largest_lane_batch
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import Volumes

STRATEGIES: tuple[Strategy, ...] = ("spread", "single", "direct", "auto")
_NOTICEABLE = 1.01  # a leaf is listed if this many times the bytes that are needed are read


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One strategy, on one mesh."""

    strategy: Strategy
    plan: RestorePlan
    volumes: Volumes
    seconds: float
    device_bytes: int  # of the restored state on one device
    device_peak: int  # on a device, while the state is restored


def forecast(
    leaves: Sequence[Leaf],
    mesh: MeshInfo,
    processes: int,
    rates: cost.Rates,
    free: int,
    strategy: Strategy,
    replica_axis: Any = None,
) -> Forecast:
    """Returns what a restore of these leaves would do, with `free` bytes of memory free on each device."""
    options = Options(strategy=strategy, replica_axis=replica_axis)
    state = sum(leaf.block_bytes for leaf in leaves)
    limit = memory.limit(options, state, largest_lane_batch(leaves, [mesh]), free)
    group_bytes = memory.group_bytes(limit, strategy)
    plan = choose_plan(leaves, [mesh], options, processes=processes, group_bytes=group_bytes)
    if strategy == "auto":
        plan = _divided(plan, mesh, processes, rates)
    counted = volumes.count(plan, [mesh], processes)
    largest = max((group.device_bytes for group in plan.groups), default=0)
    return Forecast(
        strategy,
        plan,
        counted,
        _seconds(plan, counted, mesh, processes, rates),
        state,
        state + max(min(limit, sum(group.device_bytes for group in plan.groups)), largest),
    )


def _divided(plan: RestorePlan, mesh: MeshInfo, processes: int, rates: cost.Rates) -> RestorePlan:
    """Returns the plan with the boundary where `auto` is expected to end if links keep these rates."""
    groups = bytes_of_groups(plan, [mesh], processes)
    storage = min(rates.storage, rates.storage_total / processes)
    steady = Progress(0, 0, ready=True, idle=True, waiting=cost.START, storage=storage, fabric=rates.fabric)
    others = volumes.Loads(plan.leaves, [mesh], processes).direct(plan.direct).read
    boundary = best_boundary(groups, Ends(0, len(groups)), 0, [steady], others)
    return plan.divided(range(boundary, len(groups)))


def _seconds(plan: RestorePlan, counted: Volumes, mesh: MeshInfo, processes: int, rates: cost.Rates) -> float:
    """Returns seconds by the cost model, where chunks are read whole. Exchanges go on beside direct reads."""
    loads = volumes.Loads(plan.leaves, [mesh], processes)
    exchanged, direct = loads.travelling(plan.groups), loads.direct(plan.direct)
    read = read_by_all = 0
    for load, leaves in ((exchanged, plan.sources(plan.groups)), (direct, {plan.source(leaf) for leaf in plan.direct})):
        needed = sum(counted.leaf_needed[leaf] for leaf in leaves)
        times = sum(counted.leaf_read[leaf] for leaf in leaves) / needed if needed else 1.0
        read += int(load.read * times)
        read_by_all += int(load.read_by_all * times)
    both = dataclasses.replace(exchanged, read=read, read_by_all=read_by_all, arrays=exchanged.arrays + direct.arrays)
    return cost.seconds(both, rates)


@dataclasses.dataclass(frozen=True)
class UnfitChunks:
    """A leaf whose stored chunks make processes read more than they need."""

    leaf: Leaf
    read: int
    needed: int

    def __str__(self) -> str:
        sizes = zip(self.leaf.block, self.leaf.chunk or (), strict=False)
        dims = ", ".join(str(dim) for dim, (block, chunk) in enumerate(sizes) if block % chunk) or "-"
        return f"{self.leaf.name}: chunks {self.leaf.chunk} do not fit blocks {self.leaf.block} in dimension {dims}"


def unfit_chunks(counted: Volumes, leaves: Sequence[Leaf]) -> list[UnfitChunks]:
    """Returns the leaves of which more is read than needed, the worst first."""
    unfit = [
        UnfitChunks(leaf, counted.leaf_read[index], counted.leaf_needed[index])
        for index, leaf in enumerate(leaves)
        if counted.leaf_read[index] > _NOTICEABLE * counted.leaf_needed[index]
    ]
    return sorted(unfit, key=lambda chunks: chunks.needed - chunks.read)


def reasons(of: Forecast, leaves: Sequence[Leaf]) -> Mapping[str, list[str]]:
    """Returns why leaves are restored as they are: names by reason, those that travel first."""
    names: dict[str, list[str]] = {}
    if travelling := of.plan.sources(of.plan.groups):
        reason = f"{of.plan.strategy}: {of.plan.because or 'several processes hold the same data'}"
        names[reason] = [leaves[index].name for index in travelling]
    for index, reason in of.plan.direct.items():
        listed = names.setdefault(f"direct: {reason}", [])
        if (name := of.plan.leaves[index].name) not in listed:  # a leaf may have several slices
            listed.append(name)
    return names


def mesh_on(axes: Sequence[tuple[str, int]], processes: int) -> MeshInfo:
    """Returns a mesh over all devices in order. Raises `ValueError` if they do not divide over the processes."""
    devices = math.prod(size for _, size in axes)
    if processes < 1 or devices % processes:
        raise ValueError(
            f"{devices} devices of the mesh do not divide over {processes} processes: give a number that divides them"
        )
    owners = tuple(device // (devices // processes) for device in range(devices))
    return MeshInfo(tuple(name for name, _ in axes), tuple(size for _, size in axes), owners)
