"""Which leaves travel and which are read directly: the plan that a restore follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from orbax_ext.options import Options
from orbax_ext.plan.cost import Rates, is_tiny, seconds
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import Group, RestorePlan, by_replicas, make_plan, who_travels
from orbax_ext.plan.topology import MeshInfo
from orbax_ext.plan.volumes import Loads

_WORTH = 0.5  # seconds that a change must save, by expectation, to be made
_WORTH_SHARE = 1 / 3  # of the time that an exchange must save: it takes more of links and processors than is modelled
_BESIDE = 0.8  # an exchange is not noticed if it takes up to this share of the time of the reads beside it


def choose_plan(
    leaves: Sequence[Leaf],
    meshes: Sequence[MeshInfo],
    options: Options,
    *,
    processes: int,
    group_bytes: int,
    rates: Rates | None = None,
) -> RestorePlan:
    """Returns the plan for these leaves; for strategy "auto", with direct reads where the cost model prefers them.

    `rates` are the link rates to choose by; by default those in the options, if any.
    """
    plan = make_plan(leaves, meshes, options, processes=processes, group_bytes=group_bytes)
    if options.strategy != "auto":
        return plan
    return with_cheapest(plan, meshes, processes, rates or Rates.given(options))


def anything_travels(leaves: Sequence[Leaf], meshes: Sequence[MeshInfo], options: Options, *, processes: int) -> bool:
    """Returns whether any leaf may travel from process to process.

    The answer does not depend on the memory limit, on which processes agree later, so it is the same on all of them.
    Where rates are given, `choose_plan` may still decide to read every leaf directly.
    """
    _, travelling = who_travels(leaves, meshes, options, processes=processes)
    indices = [index for kind in travelling.values() for index in kind]
    if options.strategy == "auto" and Rates.given(options) is None:
        return not is_tiny(Loads(leaves, meshes, processes).direct(indices))
    return bool(indices)


def with_cheapest(
    plan: RestorePlan,
    meshes: Sequence[MeshInfo],
    processes: int,
    rates: Rates | None,
    *,
    done: int = 0,
    pace: float | None = None,
    read: int = 0,
) -> RestorePlan:
    """Returns the plan with groups `done` and later moved to direct reads where the cost model expects a gain.

    Without rates, all groups are moved if the state is too small to be worth an exchange. `pace` is the seconds that a
    group has taken so far; by default it is computed from the rates. Groups before `read` have been read already: they
    travel beside direct reads if they are expected to arrive long before these end.
    """
    loads = Loads(plan.leaves, meshes, processes)
    if rates is None:
        everything = plan.sources(plan.groups)
        if not is_tiny(loads.direct(everything)):
            return plan
        reason = "the state is too small to be worth an exchange"
        return dataclasses.replace(plan, groups=(), direct={**plan.direct, **dict.fromkeys(everything, reason)})
    direct, kept, reasons = dict(plan.direct), list(plan.groups[:done]), []
    for kind in by_replicas(plan.groups[done:]).values():
        bound = _bound(plan, kept, kind)
        kept += kind[:bound]
        groups = kind[bound:]
        if not groups:
            continue
        leaves = plan.sources(groups)
        apart = seconds(loads.direct(leaves), rates)
        together = seconds(loads.travelling(groups), rates) if pace is None else pace * len(groups)
        needed = max(_WORTH, _WORTH_SHARE * apart) if pace is None else -_WORTH
        # On a link that carries both, an exchange takes as long as reading does.
        one_link = rates.may_be_one_link and pace is None
        if apart >= together + needed and not one_link:
            kept += groups
            reasons.append(f"{together:.1f} s expected, {apart:.1f} s if every process reads its own ({rates})")
            continue
        read_already = [] if one_link else [group for group in groups if group in plan.groups[done:read]]
        read_already += groups[len(read_already) :][: _bound(plan, read_already, groups[len(read_already) :])]
        if read_already:
            rest = plan.sources(groups[len(read_already) :])
            beside = seconds(loads.direct([*rest, *plan.direct]), rates)
            if seconds(loads.travelling(read_already), rates) < _BESIDE * beside:
                kept += read_already
                reasons.append(f"it had been read before the strategy was chosen ({rates})")
                leaves = rest
        why = "storage and fabric may be one link" if one_link else f"{together:.1f} s if exchanged"
        direct |= dict.fromkeys(leaves, f"{apart:.1f} s expected, {why} ({rates})")
    because = plan.because or "; ".join(dict.fromkeys(reasons))
    return dataclasses.replace(plan, groups=tuple(kept), direct=direct, because=because)


def _bound(plan: RestorePlan, kept: Sequence[Group], groups: Sequence[Group]) -> int:
    """Returns how many groups must travel because they hold slices of leaves that have begun to travel."""
    bound, begun = 0, set(plan.sources(kept))
    for number, group in enumerate(groups):
        if begun & set(plan.sources([group])):
            begun |= set(plan.sources(groups[bound : number + 1]))
            bound = number + 1
    return bound
