"""What a restore would do, strategy by strategy: bytes by process, seconds, memory. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_ext.options import Options, Strategy
from orbax_ext.plan import choose, cost, memory, planner, volumes
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import RestorePlan
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import Volumes

STRATEGIES: tuple[Strategy, ...] = ("spread", "single", "direct", "auto")
_NOTICEABLE = 1.01  # times what is needed, above which a leaf's chunks are to blame


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One strategy, on one mesh."""

    strategy: Strategy
    plan: RestorePlan
    volumes: Volumes
    seconds: float
    device_bytes: int  # of the restored state on one device
    device_peak: int  # on a device, while it is restored

    @property
    def travelling(self) -> list[int]:
        """The leaves that are read once and exchanged."""
        return choose.sources(self.plan, self.plan.groups)


def forecast(
    leaves: Sequence[Leaf],
    mesh: MeshInfo,
    processes: int,
    rates: cost.Rates,
    free: int,
    strategy: Strategy,
    replica_axis: Any = None,
) -> Forecast:
    """What a restore of these leaves would do, with so much memory free on each device."""
    options = Options(strategy=strategy, replica_axis=replica_axis)
    state = sum(leaf.block_bytes for leaf in leaves)
    limit = memory.limit(options, state, planner.largest_lane_batch(leaves, [mesh]), free)
    group_bytes = memory.group_bytes(limit)
    plan = choose.choose_plan(leaves, [mesh], options, processes=processes, group_bytes=group_bytes, rates=rates)
    counted = volumes.count(plan, leaves, [mesh], processes)
    largest = max((group.device_bytes for group in plan.groups), default=0)
    return Forecast(
        strategy,
        plan,
        counted,
        _seconds(plan, counted, mesh, processes, rates),
        state,
        state + max(min(limit, sum(group.device_bytes for group in plan.groups)), largest),
    )


def _seconds(plan: RestorePlan, counted: Volumes, mesh: MeshInfo, processes: int, rates: cost.Rates) -> float:
    """By the cost model, with what chunks bring along counted as read. What is read directly comes last."""
    costs = cost.Costs(plan.leaves, [mesh], processes)
    travelling = choose.sources(plan, plan.groups)
    total = 0.0
    for load, leaves in ((costs.travelling(plan.groups), travelling), (costs.direct(plan.direct), [*plan.direct])):
        times = amplification(counted, leaves)
        total += dataclasses.replace(
            load, read=int(load.read * times), read_by_all=int(load.read_by_all * times)
        ).seconds(rates)
    return total


def amplification(counted: Volumes, leaves: Sequence[int]) -> float:
    """How many times the bytes that are needed are read, because chunks are read whole."""
    needed = sum(counted.leaf_needed[leaf] for leaf in leaves)
    return sum(counted.leaf_read[leaf] for leaf in leaves) / needed if needed else 1.0


@dataclasses.dataclass(frozen=True)
class Blame:
    """A leaf whose stored chunks make processes read more than they need."""

    leaf: Leaf
    read: int
    needed: int

    def __str__(self) -> str:
        unfit = [
            dim
            for dim, (block, chunk) in enumerate(zip(self.leaf.block, self.leaf.chunk or (), strict=False))
            if block % chunk
        ]
        dims = ", ".join(map(str, unfit)) or "-"
        return f"{self.leaf.name}: chunks {self.leaf.chunk} do not fit blocks {self.leaf.block} in dimension {dims}"


def to_blame(counted: Volumes, leaves: Sequence[Leaf]) -> list[Blame]:
    """The leaves that are read more than they are needed, the worst first."""
    found = [
        Blame(leaf, counted.leaf_read[index], counted.leaf_needed[index])
        for index, leaf in enumerate(leaves)
        if counted.leaf_read[index] > _NOTICEABLE * counted.leaf_needed[index]
    ]
    return sorted(found, key=lambda blame: blame.needed - blame.read)


def reasons(found: Forecast, leaves: Sequence[Leaf]) -> Mapping[str, list[str]]:
    """Why leaves are restored as they are: names by reason, those that travel first."""
    told: dict[str, list[str]] = {}
    if travelling := found.travelling:
        how = f"{found.plan.strategy}: {found.plan.because or 'several processes hold the same data'}"
        told[how] = [leaves[index].name for index in travelling]
    for index, reason in found.plan.direct.items():
        told.setdefault(f"direct: {reason}", []).append(leaves[index].name)
    return told


def mesh_on(axes: Sequence[tuple[str, int]], processes: int) -> MeshInfo:
    """A mesh over all devices in order, the same number on each process; `ValueError` if they do not divide."""
    devices = math.prod(size for _, size in axes)
    if processes < 1 or devices % processes:
        raise ValueError(
            f"{devices} devices of the mesh do not divide over {processes} processes: give a number that divides them"
        )
    each = devices // processes
    owners = tuple(device // each for device in range(devices))
    return MeshInfo(tuple(name for name, _ in axes), tuple(size for _, size in axes), owners)
