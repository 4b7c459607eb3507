"""How a plan is carried out: which group comes next, and who reads what when readers are late, fail or are slow. Pure.

A course changes only by what all processes have told at a meeting, so it is the same on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from orbax_ext.plan import readers
from orbax_ext.plan.boundary import Ends
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import Group, RestorePlan
from orbax_ext.plan.topology import MeshInfo

Deal = Callable[[Sequence[int], Sequence[Leaf]], Group]  # makes a group of some leaves and slices of a plan's leaves


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process tells at a meeting about its share of the next group, or of what is read directly."""

    upto: int  # the place in the order before which it has read groups, or may begin to before the meeting is over
    rate: float | None = None  # bytes per second that it reads; None before it is known, 0 if it is stuck
    late: bool = False  # its share is not there
    failed: Mapping[str, str] | None = None  # its share will not be there: the error
    lacks: tuple[int, ...] = ()  # groups that it should have read directly, by number
    long: bool = False  # it has read for so long that it is worth dealing again by rates
    busy: bool = False  # after the last exchange has begun: it waits for what nobody takes over

    @property
    def ready(self) -> bool:
        return not self.late and self.failed is None

    def to_json(self) -> dict[str, Any]:
        """Returns what differs from an ordinary share, for a message."""
        ordinary = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in vars(self).items() if value != ordinary[name]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Share:
        given = {field.name: told[field.name] for field in dataclasses.fields(cls) if field.name in told}
        return cls(**{**given, "lacks": tuple(given.get("lacks", ()))})


class Course:
    """A plan, the order in which its groups travel, and how far they are.

    Groups that were added to the plan have numbers behind those of the others, wherever they travel in the order.
    """

    def __init__(self, plan: RestorePlan, meshes: Sequence[MeshInfo]) -> None:
        self.plan = plan
        self.ends = Ends(0, len(plan.groups))  # by place in the order
        self.order = list(range(len(plan.groups)))
        self._made = plan.groups
        self._meshes = meshes
        self._dealt_by: dict[int, float] = {}
        self._told: dict[int, float | None] = {}  # the latest rates
        self._long = False  # somebody has read for so long that others should if they are faster

    @property
    def groups_left(self) -> bool:
        """Whether a group has not begun to travel and is not read directly."""
        return self.ends.front < self.ends.back

    @property
    def catching_up(self) -> bool:
        """Whether a group is still to travel that fills holes of an earlier one."""
        return any(number >= len(self._made) for number in self.order[self.ends.front : self.ends.back])

    @property
    def replicas(self) -> int:
        """How many replicas share the reads of a group; of the group with the fewest."""
        return min((math.prod(self._sizes(group).values()) for group in self._made), default=1)

    def group(self, place: int) -> Group:
        return self.plan.groups[self.order[place]]

    def as_planned(self, number: int) -> Group:
        """Returns a group by its number, with the shares of the plan."""
        return self._made[number] if number < len(self._made) else self.plan.groups[number]

    def only(self, number: int) -> RestorePlan:
        """Returns the plan with one group, to count its bytes."""
        return dataclasses.replace(self.plan, groups=(self.plan.groups[number],))

    def next(self) -> None:
        """Notes that the exchange of the group at the front begins."""
        self.ends = Ends(self.ends.front + 1, self.ends.back)

    def take_over(self, shares: Mapping[int, Share], tried: Collection[int] = ()) -> list[int] | None:
        """Takes the processes that are not ready out of the readers of the next group.

        Returns the groups that the others read in their place, by number; None if nobody else can read it. Those who
        have `tried` can't.
        """
        late = {process for process, share in shares.items() if not share.ready}
        number = self.order[self.ends.front]
        group = self.plan.groups[number]
        deal = self._dealing(group, shares, late.union(tried))
        if deal is None:
            return None
        absent = readers.replicas_with(group, self._meshes, late)
        holes = readers.without(group, absent, self.plan.leaves, self._sizes(group))
        groups = list(self.plan.groups)
        groups[number] = holes.group
        self.plan = dataclasses.replace(self.plan, leaves=holes.leaves, groups=tuple(groups))
        if not holes.missing:
            return []
        return [self._add(deal(holes.missing, self.plan.leaves), shares)]

    def take_over_direct(self, shares: Mapping[int, Share], tried: Collection[int] = ()) -> list[int] | None:
        """Lets groups travel that processes lack which should have read them directly.

        Returns the new groups by number; None if there is one that nobody else can read. Those who have `tried` can't.
        """
        added = []
        for number in sorted({number for share in shares.values() for number in share.lacks}):
            group = self.as_planned(number)
            lacking = {process for process, share in shares.items() if number in share.lacks}
            deal = self._dealing(group, shares, lacking.union(tried))
            if deal is None:
                return None
            added.append(deal(group.leaves, self.plan.leaves))
        return [self._add(group, shares) for group in added]

    def deal(self, shares: Mapping[int, Share]) -> list[int]:
        """Deals groups that nobody has begun to read by the rates of the processes; returns those that have changed."""
        self._told = {process: share.rate for process, share in shares.items()}
        self._long = any(share.long for share in shares.values())
        rates = _filled(self._told)
        if not self._long and 0 not in self._told.values():
            return []
        if not any(rates.values()) or not self._rates_changed(rates):
            return []
        self._dealt_by = rates
        numbers = [n for n in self.order[self._untouched(shares) : self.ends.back] if n < len(self._made)]
        made = [self._made[number] for number in numbers]
        dealt, leaves = readers.redealt(made, self.plan.leaves, self._meshes, rates, self._one_reader)
        groups = list(self.plan.groups)
        changed = [number for number, group in zip(numbers, dealt, strict=True) if groups[number] != group]
        for number, group in zip(numbers, dealt, strict=True):
            groups[number] = group
        self.plan = dataclasses.replace(self.plan, leaves=leaves, groups=tuple(groups))
        return changed

    def as_read_by_another(self, number: int) -> Group | None:
        """Returns a group of one reader as another replica would read it; None if that is not worth comparing.

        That is the next replica of other processes, where the reader has read for long and nobody else has a rate.
        """
        group = self.as_planned(number)
        reader = next((bundle.reader for bundle in group.bundles), None)
        if not self._one_reader or not self._long or reader is None:
            return None
        rows = [set(owners.tolist()) for owners in self._meshes[group.mesh].owners(group.axes)]
        if {process for process, rate in self._told.items() if rate is not None} != rows[reader]:
            return None
        for replica in (*range(reader + 1, len(rows)), *range(reader)):
            if not rows[replica] & rows[reader]:
                return readers.read_by(replica, group, self.plan.leaves, len(rows))
        return None

    def move_boundary(self, boundary: int) -> list[int]:
        """Moves the boundary; returns the groups that are to be read directly now, the last one first."""
        moved = self.order[boundary : self.ends.back]
        self.ends = Ends(self.ends.front, boundary)
        return moved[::-1]

    @property
    def carried_out(self) -> RestorePlan:
        """The plan with the groups that are read directly as such."""
        if self.ends.back == len(self.order):
            return self.plan
        return self.plan.divided(self.order[self.ends.back :])

    @property
    def _one_reader(self) -> bool:
        return self.plan.strategy == "single"

    def _add(self, group: Group, shares: Mapping[int, Share]) -> int:
        """Adds a group of what was not read. It travels after those that somebody reads already."""
        number, place = len(self.plan.groups), self._untouched(shares)
        self.plan = dataclasses.replace(self.plan, groups=(*self.plan.groups, group))
        self.order.insert(place, number)
        self.ends = Ends(self.ends.front, self.ends.back + 1)
        return number

    def _untouched(self, shares: Mapping[int, Share]) -> int:
        """Returns the first place in the order at which nobody has begun to read the group."""
        upto = max(share.upto for share in shares.values())
        return min(self.ends.back, max(upto, self.ends.front + 1))

    def _dealing(self, group: Group, shares: Mapping[int, Share], late: Collection[int]) -> Deal | None:
        """Returns how a part of a group is dealt to those who are not late; None if they do not hold all of it.

        To replicas without a late process if there are any.
        """
        for rates in ({p: share.rate for p, share in shares.items()}, dict.fromkeys(shares, 1.0)):
            known = {p: 0.0 if p in late else rate for p, rate in _filled(rates).items()}
            by_replica = readers.replica_rates(group, self._meshes, known)
            if any(by_replica):
                return functools.partial(readers.dealt, group, rates=by_replica, one_reader=self._one_reader)
            by_column = readers.column_rates(group, self._meshes, known)
            if all(map(any, by_column)):
                return functools.partial(readers.dealt_by_column, group, rates=by_column, one_reader=self._one_reader)
        return None

    def _sizes(self, group: Group) -> dict[str, int]:
        return {axis: self._meshes[group.mesh].sizes[axis] for axis in group.axes}

    def _rates_changed(self, rates: Mapping[int, float]) -> bool:
        """Returns whether the rates differ from those that groups were dealt by: by more than noise, all or one."""
        before = self._dealt_by or dict.fromkeys(rates, 1.0)
        if any(bool(rates[process]) != bool(before[process]) for process in rates):
            return True
        return readers.differ([rate / before[process] for process, rate in rates.items() if rate])


def _filled(rates: Mapping[int, float | None]) -> dict[int, float]:
    """Returns rates in which processes that have read nothing yet are taken as ordinary."""
    known = [rate for rate in rates.values() if rate]
    usual = statistics.median(known) if known else 1.0
    return {process: usual if rate is None else rate for process, rate in rates.items()}
