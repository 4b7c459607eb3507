"""What happens in a simulated run, as data: how many processes, how often they restore, and which faults."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence

KINDS = (
    "crash",  # dies after `seconds`
    "pause",  # is stopped for `seconds`, or longer than the limit
    "slow",  # works longer than the limit, but advances
    "endless",  # advances for hours; only where a restore has a limit in all
    "stuck",  # would work for hours and does not advance
    "error",  # fails at work
    "interrupt",  # leaves in the middle of its work
    "interrupt arrival",  # leaves while it waits for the others to arrive
    "interrupt meeting",  # leaves while it waits at a meeting, to which it has brought its outcome
    "lost",  # one of its calls never arrives, or the answer to it
    "slow calls",  # each of its calls takes longer, within the limits
    "silence",  # the service does not answer for `seconds`
    "other tree",  # asks for something else
    "twice",  # restores once more than the others
    "never",  # does not come to this restore
    "late",  # comes after the others have given up
    "absent",  # announces that it will not come to this restore
)
# Faults of a process's share of what is read, which others can read in its place where late ones are not waited for.
SHARES = (
    "late share",  # works longer than the limit and advances; comes to the meeting when it is asked to
    "stalled share",  # would work for hours and does not advance; comes when it is asked to
    "failed share",  # comes at once without its work
)
CANCEL = "cancel"  # refuses the meeting that it goes to, at any time, and comes to it all the same
QUIET = "quiet"  # works for most of the limit without any progress, as one that compiles
FORGOTTEN = "forgotten absence"  # as "absent", but does not withdraw what it announced
HARMLESS = ("slow", "slow calls", QUIET, *SHARES)  # faults that no process may notice


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one process in one restore."""

    kind: str
    process: int
    restore: int
    meeting: int  # at which it happens, if it happens at work
    seconds: float  # when it happens, or how long it lasts

    def __str__(self) -> str:
        return f"{self.kind} of process {self.process} in restore {self.restore} ({self.meeting=}, {self.seconds=:.2f})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run. The same plan and the same seed make the same run."""

    seed: int
    processes: int
    restores: int
    meetings: int  # in each restore
    stall: float
    total: float | None
    faults: tuple[Fault, ...]
    late: float = math.inf  # seconds that the others wait for a late process

    def __str__(self) -> str:
        faults = "".join(f"\n    {fault}" for fault in self.faults) or " none"
        return (
            f"seed {self.seed}: {self.processes} processes, {self.restores} restores of {self.meetings} meetings, "
            f"stall {self.stall:g}, total {self.total}, late {self.late:g}; faults:{faults}"
        )

    def faults_of(self, process: int, restore: int) -> dict[str, Fault]:
        return {fault.kind: fault for fault in self.faults if (fault.process, fault.restore) == (process, restore)}

    def kinds(self, process: int) -> set[str]:
        return {fault.kind for fault in self.faults if fault.process == process}


def random_plan(seed: int) -> Plan:
    """Returns the plan of a seed."""
    choice = random.Random(f"plan {seed}")
    processes = choice.choices([2, 3, 4, 5, 8, 16, 64], [20, 30, 20, 15, 10, 4, 1])[0]
    restores, meetings, stall = choice.randint(1, 3), choice.randint(0, 3), choice.choice([2.0, 4.0, 8.0])
    longer, patient = _random_patience(seed, processes, restores, meetings)
    stall = longer or stall
    total = choice.choice([None, None, max(4.0, stall * choice.choice([choice.uniform(0.5, 2), choice.uniform(2, 6)]))])
    kinds = KINDS if total is not None else [kind for kind in KINDS if kind != "endless"]
    faults = tuple(
        _random_fault(choice, kinds, processes, restores, meetings, stall)
        for _ in range(choice.choice([0, 1, 1, 1, 2, 2, 3]))
    )
    late, more = _random_shares(seed, processes, restores, meetings)
    faults = (*faults, *more, *_random_absence(seed, processes, restores), *patient)
    faults += _random_cancel(seed, processes, restores, meetings, stall)
    return Plan(seed, processes, restores, meetings, stall, total, faults, late)


def _random_shares(seed: int, processes: int, restores: int, meetings: int) -> tuple[float, tuple[Fault, ...]]:
    """Returns how long late processes are waited for, and faults of shares; none of most seeds."""
    choice = random.Random(f"shares {seed}")
    if not meetings or choice.random() < 0.6:
        return math.inf, ()
    faults = tuple(
        Fault(choice.choice(SHARES), choice.randrange(processes), choice.randrange(restores), number, 0.0)
        for number in [choice.randint(1, meetings)] * choice.choice([0, 1, 1, 2])
    )
    return choice.choice([0.1, 0.3]), faults


def _random_absence(seed: int, processes: int, restores: int) -> tuple[Fault, ...]:
    """Returns an absence that is not withdrawn; none for most seeds."""
    choice = random.Random(f"absence {seed}")
    if choice.random() < 0.95:
        return ()
    return (Fault(FORGOTTEN, choice.randrange(processes), choice.randrange(restores), 0, 0.0),)


def _random_cancel(seed: int, processes: int, restores: int, meetings: int, stall: float) -> tuple[Fault, ...]:
    """Returns a restore that one process cancels; none for most seeds."""
    choice = random.Random(f"cancel {seed}")
    if not meetings or choice.random() < 0.95:
        return ()
    process, restore, meeting = choice.randrange(processes), choice.randrange(restores), choice.randint(1, meetings)
    return (Fault(CANCEL, process, restore, meeting, choice.uniform(0, stall / 2)),)


def _random_patience(seed: int, processes: int, restores: int, meetings: int) -> tuple[float, tuple[Fault, ...]]:
    """Returns a longer limit, faults that no process may notice then, and perhaps an error; none for most seeds."""
    choice = random.Random(f"patience {seed}")
    if not meetings or choice.random() < 0.92:
        return 0.0, ()
    stall, restore, meeting = 30.0, choice.randrange(restores), choice.randint(1, meetings)
    kinds = [choice.choice([QUIET, QUIET, "slow calls"]), *choice.choice([(), ("error",), ("error",), (QUIET,)])]
    return stall, tuple(Fault(kind, choice.randrange(processes), restore, meeting, stall) for kind in kinds)


def _random_fault(
    choice: random.Random, kinds: Sequence[str], processes: int, restores: int, meetings: int, stall: float
) -> Fault:
    kind = choice.choice(kinds)
    longest = {"crash": 2 * stall, "pause": 4 * stall, "silence": 3 * stall, "lost": 60}.get(kind, 3 * stall)
    seconds = choice.choice([choice.uniform(0, longest), choice.uniform(0, longest), stall + choice.uniform(2.5, 5)])
    return Fault(
        kind, choice.randrange(processes), choice.randrange(restores), choice.randint(1, max(1, meetings)), seconds
    )


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yields plans with fewer faults, processes, restores and meetings than this one, or with lower numbers."""
    for number in range(len(plan.faults)):
        yield dataclasses.replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
    for fewer in sorted({2, 3, plan.processes // 2, plan.processes - 1}):
        if max((fault.process for fault in plan.faults), default=0) < fewer < plan.processes and fewer > 1:
            yield dataclasses.replace(plan, processes=fewer)
    renumbered = _renumbered(plan)
    if renumbered != plan.faults:
        yield dataclasses.replace(plan, faults=renumbered)
    if plan.restores > 1 + max((fault.restore for fault in plan.faults), default=0):
        yield dataclasses.replace(plan, restores=plan.restores - 1)
    if plan.meetings:
        yield dataclasses.replace(plan, meetings=plan.meetings - 1)
    if not math.isinf(plan.late):
        shares = tuple(fault for fault in plan.faults if fault.kind not in SHARES)
        yield dataclasses.replace(plan, late=math.inf, faults=shares)
    if plan.total is not None:
        yield dataclasses.replace(plan, total=None)


def _renumbered(plan: Plan) -> tuple[Fault, ...]:
    """Returns the faults with the lowest numbers of processes, so that processes without one can go. 0 stays 0."""
    numbers = {process: number for number, process in enumerate(sorted({0} | {fault.process for fault in plan.faults}))}
    return tuple(dataclasses.replace(fault, process=numbers[fault.process]) for fault in plan.faults)
