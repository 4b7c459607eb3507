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
from orbax_ext.plan.planner import Group, RestorePlan, in_groups
from orbax_ext.plan.topology import MeshInfo

_USEFUL = 0.25  # of the fastest rate: a slower process would take longer for one share than all wait

Deal = Callable[[Sequence[int], Sequence[Leaf]], Group]  # makes a group of some leaves and slices of a plan's leaves


@dataclasses.dataclass(frozen=True)
class Share:
    """What one process tells at a meeting about its share of the next group, or of what is read directly."""

    upto: int  # the place in the order before which it has read groups, or may begin to before the meeting is over
    rate: float | None = None  # bytes per second that it reads; None before it is known, 0 if it is stuck
    late: bool = False  # its share is not there
    failed: Mapping[str, str] | None = None  # its share will not be there: the error
    # Groups by number: if it is late, those that it has not read of all up to `upto`; at the end, those that it should
    # have read directly.
    lacks: tuple[int, ...] = ()
    long: bool = False  # it has read for so long that it is worth dealing again by rates
    begun: int = 0  # the place before which it has begun to read groups, or will not
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
        self._taken: set[int] = set()  # groups that others fill
        self._mixed: set[int] = set()  # groups with holes that a later one fills, and those that fill them
        self._dealt_by: dict[int, float] = {}
        self._told: dict[int, float | None] = {}  # the latest rates
        self._long = False  # somebody has read for so long that others should if they are faster

    @property
    def groups_left(self) -> bool:
        """Whether a group has not begun to travel and is not read directly."""
        return self.ends.front < self.ends.back

    @property
    def catching_up(self) -> bool:
        """Whether a group is to travel that fills holes of an earlier one, or has holes that a later one fills."""
        left = self.order[self.ends.front : self.ends.back]
        return any(number >= len(self._made) or number in self._mixed for number in left)

    @property
    def replicas(self) -> int:
        """How many replicas share the reads of a group; of the group with the fewest."""
        return min((math.prod(_sizes(group, self._meshes).values()) for group in self._made), default=1)

    def group(self, place: int) -> Group:
        return self.plan.groups[self.order[place]]

    def as_planned(self, number: int) -> Group:
        """Returns a group by its number, with the shares of the plan."""
        return self._made[number] if number < len(self._made) else self.plan.groups[number]

    def next(self) -> None:
        """Notes that the exchange of the group at the front begins."""
        self.ends = Ends(self.ends.front + 1, self.ends.back)

    def late_for(self, shares: Mapping[int, Share]) -> dict[int, set[int]]:
        """Returns which processes are taken out of the readers of which groups at a meeting, by number of the group.

        Those who are not ready for the next group. Who is late will not have read either what it should read until the
        others are where they may be now. A group that fills holes waits for its turn: somebody has tried to read it.
        """
        front = self.order[self.ends.front]
        late = {front: {process for process, share in shares.items() if not share.ready}}
        for number in self.order[self.ends.front + 1 : self._untouched(shares)]:
            lacking = {process for process in late[front] if shares[process].late and number in shares[process].lacks}
            if lacking and number < len(self._made) and _alike(self.plan.groups[number], self.plan.groups[front]):
                late[number] = lacking
        return late

    def take_over(self, shares: Mapping[int, Share], tried: Collection[int] = ()) -> list[int] | None:
        """Takes the processes that are not ready out of the readers of the next group, and of others that they lack.

        Returns the groups that the others read in their place, by number; None if nobody else can read it. Those who
        have `tried` can't.
        """
        late_for = self.late_for(shares)
        front = self.group(self.ends.front)
        deal = self._dealing(front, shares, {p for p, share in shares.items() if not share.ready}.union(tried))
        if deal is None:
            return None
        return self._leave(late_for, deal, shares)

    def leave_slow(self, shares: Mapping[int, Share]) -> list[int]:
        """Takes processes that turn out to be very slow out of the readers of groups that they have not begun to read.

        Of those that somebody else may have begun; the others are dealt again. Returns the groups that this adds.
        """
        rates = _rounded(_filled({process: share.rate for process, share in shares.items()}))
        slow = {p for p, share in shares.items() if share.rate and not rates[p] and self._dealt_by.get(p, 1.0)}
        front, long = self.group(self.ends.front), any(share.long for share in shares.values())
        deal = self._dealing(front, shares, slow.union(p for p, share in shares.items() if not share.ready))
        if not slow or not long or deal is None or _one_reader(self.plan):
            return []
        rows = [set(row) for row in self._meshes[front.mesh].owners(front.axes).tolist()]
        begun = max(max(shares[p].begun for p in row) for row in rows if row & slow)
        numbers = self.order[max(self.ends.front + 1, begun) : self._untouched(shares)]
        alike = [n for n in numbers if n < len(self._made) and _alike(self.plan.groups[n], front)]
        return self._leave(dict.fromkeys(alike, slow), deal, shares) if alike else []

    def _leave(self, late_for: Mapping[int, Collection[int]], deal: Deal, shares: Mapping[int, Share]) -> list[int]:
        missing: list[int] = []
        for number, late in late_for.items():
            group = self.plan.groups[number]
            absent = readers.replicas_with(group, self._meshes, late)
            holes = readers.without(group, absent, self.plan.leaves, _sizes(group, self._meshes))
            missing += holes.missing
            self._taken.add(number)
            self._replace({number: holes.group}, holes.leaves)
        size = max(self.plan.groups[number].device_bytes for number in late_for)
        return [
            self._add(group, shares) for group in in_groups(deal(missing, self.plan.leaves), self.plan.leaves, size)
        ]

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
        rates = _rounded(_filled(self._told))
        if not self._long and 0 not in self._told.values():
            return []
        if not any(rates.values()) or not _changed(rates, self._dealt_by):
            return []
        self._dealt_by = rates
        left = self.order[self._untouched(shares) : self.ends.back]
        numbers = [number for number in left if number < len(self._made) and number not in self._taken]
        made = [self._made[number] for number in numbers]
        carried = _carried(self.plan.groups, self.order, numbers)
        dealt, leaves = readers.redealt(made, self.plan.leaves, self._meshes, rates, _one_reader(self.plan), carried)
        mixed = {n for n, group, planned in zip(numbers, dealt, made, strict=True) if group.leaves != planned.leaves}
        mixed |= {n for n, group in zip(numbers, dealt, strict=True) if group.later}
        self._mixed = self._mixed.difference(numbers) | mixed
        changed = {n: group for n, group in zip(numbers, dealt, strict=True) if self.plan.groups[n] != group}
        self._replace(changed, leaves)
        return [*changed]

    def as_read_by_another(self, number: int) -> Group | None:
        """Returns a group of one reader as another replica would read it; None if that is not worth comparing.

        That is the next replica of other processes, where the reader has read for long and nobody else has a rate.
        """
        group = self.as_planned(number)
        reader = next((bundle.reader for bundle in group.bundles), None)
        if not _one_reader(self.plan) or not self._long or reader is None:
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

    def _replace(self, changed: Mapping[int, Group], leaves: tuple[Leaf, ...]) -> None:
        groups = tuple(changed.get(number, group) for number, group in enumerate(self.plan.groups))
        self.plan = dataclasses.replace(self.plan, leaves=leaves, groups=groups)

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
                return functools.partial(readers.dealt, group, rates=by_replica, one_reader=_one_reader(self.plan))
            by_column = readers.column_rates(group, self._meshes, known)
            if all(map(any, by_column)):
                return functools.partial(
                    readers.dealt_by_column, group, rates=by_column, one_reader=_one_reader(self.plan)
                )
        return None


def _rounded(rates: Mapping[int, float]) -> dict[int, float]:
    """Returns rates without noise: those near the usual one are the same, and a very slow process reads nothing."""
    known = [rate for rate in rates.values() if rate]
    usual, most = statistics.median(known) if known else 1.0, max(known, default=1.0)
    return {
        process: usual if not readers.differ([rate, usual]) else rate if rate >= _USEFUL * most else 0.0
        for process, rate in rates.items()
    }


def _filled(rates: Mapping[int, float | None]) -> dict[int, float]:
    """Returns rates in which processes that have read nothing yet are taken as ordinary."""
    known = [rate for rate in rates.values() if rate]
    usual = statistics.median(known) if known else 1.0
    return {process: usual if rate is None else rate for process, rate in rates.items()}


def if_late(course: Course, meshes: Sequence[MeshInfo]) -> RestorePlan:
    """Returns the plan with the groups that would travel next if a process were late, to compile them."""
    imagined = Course(course.plan, meshes)
    imagined.order, imagined.ends = [*course.order], course.ends
    front = course.group(course.ends.front)
    owners = meshes[front.mesh].owners(front.axes).tolist()
    upto = min(course.ends.front + len(owners) ** 2, course.ends.back)
    lacks, late = tuple(course.order[course.ends.front : upto]), owners[-1][0]
    processes = {process for row in owners for process in row}
    added = imagined.take_over({p: Share(upto, late=p == late, lacks=lacks if p == late else ()) for p in processes})
    groups = [imagined.plan.groups[number] for number in (lacks[0], *(added or ()))]
    return dataclasses.replace(imagined.plan, groups=tuple(groups))


def _carried(groups: Sequence[Group], order: Sequence[int], numbers: Sequence[int]) -> dict[readers.Kind, list[int]]:
    """Returns the slices that some groups have to bring because they fill holes of others in the order."""
    others = {
        index for number in set(order).difference(numbers) for _, later in groups[number].later for index in later
    }
    carried: dict[readers.Kind, list[int]] = {}
    for group in (groups[number] for number in numbers):
        carried.setdefault((group.mesh, group.axes), []).extend(index for index in group.leaves if index in others)
    return carried


def _alike(group: Group, other: Group) -> bool:
    return (group.mesh, group.axes) == (other.mesh, other.axes)


def _one_reader(plan: RestorePlan) -> bool:
    return plan.strategy == "single"


def _sizes(group: Group, meshes: Sequence[MeshInfo]) -> dict[str, int]:
    return {axis: meshes[group.mesh].sizes[axis] for axis in group.axes}


def _changed(rates: Mapping[int, float], dealt_by: Mapping[int, float]) -> bool:
    """Returns whether the rates differ from those that groups were dealt by: by more than noise, all or one."""
    before = dealt_by or dict.fromkeys(rates, 1.0)
    if any(bool(rates[process]) != bool(before[process]) for process in rates):
        return True
    return readers.differ([rate / before[process] for process, rate in rates.items() if rate])
