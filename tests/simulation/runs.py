"""Runs a plan in a simulated world and checks what must hold in every run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from orbax_ext import errors
from orbax_ext.meeting.keys import SubjectKeys
from orbax_ext.meeting.protocol import GRACE, HAND_IN_LIMIT, LEADER, RESTORE_ERRORS, SILENCE, SPREAD
from tests.simulation.plans import CANCEL, FORGOTTEN, HARMLESS, QUIET, SHARES, Fault, Plan, random_plan, smaller
from tests.simulation.processes import ASKS_EVERY, FINAL, QUIET_PART, SUBJECT, InterruptError, Process, Record, report
from tests.simulation.world import HEARTBEAT, World

_LONGEST = 100_000.0  # seconds of virtual time after which a run counts as hanging
_LOOK = 4.0  # seconds until a process looks whether the restore has ended, and has removed its keys
_MARGIN = 4.0  # seconds for messages and looks; 20,000 seeds need at most 2.6
_PROMPT = 3.0  # seconds and a look until all know of a failure; 20,000 seeds need at most 1.8
_MOMENT = 1.0  # seconds until process 0 has seen who comes
_UNHEARD = 3.0  # seconds between two reports of a process that advances, and until process 0 reads them
_FOR_EACH = 0.05  # seconds more for each process, as process 0 replies to one after the other
_LONG_CALL = 0.4  # seconds: after a reply that takes longer, process 0 may have to publish its status once more
_DEAF = {"crash", "pause", "lost", "silence"}  # with such a fault a process does not hear what the others decide
_BROUGHT = {"error", "interrupt", "interrupt meeting", CANCEL}  # such a failure is at the next meeting at once
_INTERRUPTS = {"interrupt", "interrupt arrival", "interrupt meeting"}
_NOT_TOLD = {"crash", "lost", *_INTERRUPTS}  # such a process may end with another error


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has ended: what was wrong, and how it came about."""

    plan: Plan
    problems: tuple[str, ...]
    records: tuple[Record, ...]
    trace: tuple[str, ...]


def run(plan: Plan, *, tracing: bool = False) -> Run:
    """Runs a plan to its end."""
    world = World(plan.seed, tracing=tracing)
    processes = [Process(world, plan, number) for number in range(plan.processes)]
    problems: list[str] = []
    try:
        for process in processes:
            process.start(process.faulty())
        ended = world.run(_LONGEST)
        problems += [] if ended else ["the run does not end"]
        problems += _check(plan, processes)
        problems += _check_keys(plan, world, processes)
        if ended and all(process.host.alive for process in processes):
            problems += _check_final(plan, world, processes)
    except Exception as error:  # a defect of the protocol that shows as an exception of its own
        problems.append(f"exception in the simulation: {error!r}")
    records = tuple(record for process in processes for record in process.records)
    return Run(plan, tuple(problems), records, tuple(world.trace or ()))


def suspects(plan: Plan) -> set[int]:
    """Returns the processes that may be named in an error: those with a fault that can make a restore fail."""
    if _long_silence(plan):
        return set(range(plan.processes))  # nobody can be heard, and each one gives up when it notices
    harmful = _harmful(plan)
    named = {fault.process for fault in harmful if fault.kind != "silence"}
    if harmful or plan.total is not None:  # a slow process may miss the restore that follows, or reach the limit in all
        late = {*HARMLESS, "pause"}
        if plan.total is None:  # a quiet process learns from its reports that the others have failed
            late.remove(QUIET)
        named |= {fault.process for fault in plan.faults if fault.kind in late}
    return named


def _harmful(plan: Plan) -> set[Fault]:
    """Returns the faults that can make a restore fail which has no limit in all."""
    harmful = {
        f
        for f in plan.faults
        if f.kind not in HARMLESS
        and not (f.kind == "silence" and f.seconds < plan.stall)
        and not (f.kind == "pause" and _paused(plan, f.restore) <= plan.stall - _UNHEARD)
    }
    return harmful | {fault for fault in plan.faults if fault.kind in SHARES and not _others_can_read(plan, fault)}


def _paused(plan: Plan, restore: int) -> float:
    """Returns for how many seconds processes are stopped or quiet in a restore, one after the other."""
    faults = [fault for fault in plan.faults if fault.restore == restore]
    quiet = QUIET_PART * plan.stall if any(fault.kind == QUIET for fault in faults) else 0.0
    return quiet + sum(fault.seconds for fault in faults if fault.kind == "pause")


def _others_can_read(plan: Plan, fault: Fault) -> bool:
    """Returns whether a process comes to the meeting of a fault with its share."""
    late = {
        other.process
        for other in plan.faults
        if other.kind in SHARES and (other.restore, other.meeting) == (fault.restore, fault.meeting)
    }
    return fault.kind != "stalled share" or len(late) < plan.processes


def _check(plan: Plan, processes: list[Process]) -> Iterator[str]:
    records = [record for process in processes for record in process.records]
    healthy = [process for process in processes if not plan.kinds(process.host.number)]
    yield from (f"process {p.host.number} has {error!r}" for p in processes for error in p.unexpected)
    yield from (f"process {p.host.number} does not end" for p in processes if p.host.alive and not p.finished)
    if not _harmful(plan) and not _long_silence(plan):
        yield from (f"fails without a reason: {r}" for r in records if r.error and not _ran_out(plan, r, records))
    yield from _check_names(plan, records)
    yield from _check_sessions(plan, records)
    yield from _check_healthy(plan, healthy, _left_behind(plan, records))
    yield from _check_payloads(records)
    yield from _check_reports(plan, records)
    limit = _longest_wait(plan)
    yield from (
        f"waits {r.overtime:.1f} s: {r}" for r in records if r.overtime > limit and r.process not in suspects(plan)
    )
    yield from _check_total(plan, records)
    yield from _check_work(plan, records)
    yield from _check_later(plan, records)
    if not _may_be_silent(plan):  # also a process that was stopped gives the service the time to answer
        yield from (f"gives up a service that answers: {r}" for r in records if "does not answer" in str(r.error))
    yield from _check_messages(plan, processes)


def _longest_wait(plan: Plan) -> float:
    """Returns the seconds that a process may wait at a meeting after any process advanced last."""
    kinds = {fault.kind for fault in plan.faults}
    if kinds and kinds <= _BROUGHT and math.isinf(plan.late):  # nobody is missing
        return plan.stall / 4 + _PROMPT + _FOR_EACH * plan.processes  # it looks every `stall` / 4
    grace = GRACE + SPREAD + _may_be_silent(plan) * SILENCE
    # Who comes and leaves again shows that the others may still come.
    grace += max((fault.seconds / 4 for fault in plan.faults if fault.kind == "interrupt arrival"), default=0.0)
    return plan.stall + grace + _MARGIN + _FOR_EACH * plan.processes + _slow(plan)


def _may_be_silent(plan: Plan) -> bool:
    """Returns whether the service may leave a process without an answer."""
    return any(f.kind in ("silence", "lost") or (f.kind in ("pause", "crash") and not f.process) for f in plan.faults)


def _slow(plan: Plan) -> float:
    """Returns the seconds that slow calls take. Process 0 makes calls for each of the others; they see it advance.

    If a call takes long, the two statuses that show it are due after every reply, and not after every second one.
    """
    longest = max((fault.seconds for fault in plan.faults if fault.kind == "slow calls"), default=0.0)
    call = min(longest, plan.stall) / 20
    return call * (20 + (3 if call > _LONG_CALL else 2) * plan.processes)


def _check_total(plan: Plan, records: list[Record]) -> Iterator[str]:
    """A restore ends within the limit in all plus the grace."""
    if plan.total is None:
        return
    slow = _slow(plan)
    deaf = any(fault.kind in _DEAF for fault in plan.faults)
    for record in records:
        if record.overdue > GRACE + SPREAD + SILENCE + _LOOK + slow:
            yield f"waits {record.overdue:.1f} s longer than the limit in all: {record}"
        # A process at work that hears nothing does not learn that the restore has ended.
        if record.seconds - record.reporting > plan.total + GRACE + SPREAD + _LOOK + slow and not deaf:
            yield f"takes {record.seconds:.1f} s of {plan.total:.1f} s: {record}"


def _check_work(plan: Plan, records: list[Record]) -> Iterator[str]:
    """Who still works when a restore has ended learns it within seconds."""
    if any(fault.kind in _DEAF for fault in plan.faults):
        return
    most = plan.stall / 4 + _PROMPT + _LOOK + _FOR_EACH * plan.processes + _slow(plan)
    for session in {record.session for record in records if record.session}:
        ended = [r for r in records if r.session == session and not plan.kinds(r.process) & _INTERRUPTS]
        ends = [record.ended - record.reporting for record in ended]
        if ends and max(ends) - min(ends) > most:
            yield f"work goes on for {max(ends) - min(ends):.1f} s: {max(ended, key=lambda record: record.ended)}"


def _check_later(plan: Plan, records: list[Record]) -> Iterator[str]:
    """After a failure of which all know at once, the restores without a fault do not fail."""
    kinds = {fault.kind for fault in plan.faults}
    if plan.total is None and plan.stall >= 4 and kinds <= {*_BROUGHT, "other tree", *HARMLESS}:
        restores = {fault.restore for fault in _harmful(plan)}  # also shares that nobody is left to read
        yield from (f"fails without a fault: {r}" for r in records if r.error and r.restore not in restores)


def _check_names(plan: Plan, records: list[Record]) -> Iterator[str]:
    """A culprit that exists is named, and nobody else."""
    guilty = suspects(plan)
    behind = _left_behind(plan, records)
    deaf = any(fault.kind in _DEAF for fault in plan.faults)
    for record in records:
        if isinstance(record.error, RESTORE_ERRORS) and not record.named:
            yield f"names nobody: {record}"
        if not record.named or record.process in guilty:
            continue
        failed = isinstance(record.error, errors.RestoreFailedError)
        if _ran_out(plan, record, records) and (not failed or record.named & guilty):  # the missing may only be at work
            came = {r.process for r in _of_session(record, records) if r.waited > _LOOK}
            if not deaf and record.named & came - guilty:
                yield f"names {sorted(record.named & came)}, who had come: {record}"
        elif record.process in behind and not record.session:
            continue  # those who were told have left
        elif not record.named & guilty:
            yield f"does not name the culprit: {record}"
        elif not record.named <= guilty:
            yield f"names an innocent process: {record}"


def _ran_out(plan: Plan, record: Record, records: list[Record]) -> bool:
    """Returns whether a restore may have failed because a process had reached the limit in all."""
    if plan.total is None or not isinstance(record.error, RESTORE_ERRORS):
        return False
    together = _of_session(record, records)
    if not record.session:  # the first to reach it tells the others
        together += [
            each for each in records if each.restore == record.restore and str(each.error) == str(record.error)
        ]
    return max(each.seconds for each in together) >= plan.total


def _of_session(record: Record, records: list[Record]) -> list[Record]:
    return [each for each in records if each is record or (record.session and each.session == record.session)]


def _check_sessions(plan: Plan, records: list[Record]) -> Iterator[str]:
    """All processes of a session return, or all raise the same error."""
    sessions: dict[str, list[Record]] = {}
    for record in records:
        if record.session and not plan.kinds(record.process) & _NOT_TOLD:
            sessions.setdefault(record.session, []).append(record)
    for ended in sessions.values():
        if len({str(record.error) for record in ended}) > 1 and not _long_silence(plan):
            yield "ends differently: " + " | ".join(map(str, ended))


def _check_healthy(plan: Plan, healthy: list[Process], behind: Collection[int]) -> Iterator[str]:
    """Each restore ends in the same way on all processes without a fault, also where no session was opened."""
    if _long_silence(plan):
        return
    healthy = [process for process in healthy if process.host.number not in behind]
    # Without process 0, or if it is slow to reply, two that give up within the time of a message both decide, and their
    # seconds may differ.
    alone = {"never", "late", "absent", FORGOTTEN, "slow calls"} & plan.kinds(0)

    def how(record: Record) -> object:
        return (type(record.error), record.named) if alone else str(record.error)

    for restore in range(plan.restores):
        ended = [r for p in healthy for r in p.records if r.restore == restore]
        if len({r.error is None for r in ended}) > 1:
            yield "only some fail: " + " | ".join(map(str, ended))
        elif len({how(r) for r in ended}) > 1:
            yield "fail with different errors: " + " | ".join(map(str, ended))


def _check_payloads(records: list[Record]) -> Iterator[str]:
    """What a meeting returns was brought to this meeting of this session by these processes."""
    told: dict[tuple[str, int], tuple[Any, Record]] = {}
    for record in records:
        for number, found in enumerate(record.payloads):
            first, _ = told.setdefault((record.session, number), (found, record))
            if found != first:  # who is late decides who reads
                yield f"meeting {number} has {found}, on another process {first}: {record}"
            wrong = [own for process, own in found.items() if own["by"] != process]
            wrong += [own for own in found.values() if number and own["session"] != record.session]
            wrong += [own for own in found.values() if number and own["number"] != number]
            if wrong:
                yield f"meeting {number} has {wrong}: {record}"


def _check_reports(plan: Plan, records: list[Record]) -> Iterator[str]:
    """Process 0 has the reports of this session, of all processes if nothing is in the way, after a few seconds."""
    all_came = not _harmful(plan) and not any(fault.kind == "silence" for fault in plan.faults)
    for record in records:
        if record.reports is None:
            continue
        expected = {process: report(record.session, process) for process in range(plan.processes)}
        if not all_came:
            expected = {process: text for process, text in expected.items() if process in record.reports}
        if record.reports != (expected if record.process == LEADER else {}):
            yield f"has the reports {record.reports}: {record}"
        if record.reporting > HAND_IN_LIMIT + _LOOK + _slow(plan) and record.process not in suspects(plan):
            yield f"waits {record.reporting:.1f} s for reports: {record}"


def _check_messages(plan: Plan, processes: list[Process]) -> Iterator[str]:
    """Messages per process are bounded."""
    for process in processes:
        attempts = max(1, len(process.records) + (not process.host.alive))  # it may have died in one
        most = attempts * ((36 + 6 * plan.stall) * (plan.meetings + 2) + 6 * plan.processes)
        if process.host.number == LEADER:  # its pauses are a hundredth of the wait, and a message takes 0.02 s
            most += attempts * (plan.meetings + 2) * (40 + 100 * math.log((2 + plan.stall + GRACE) / 3))
        if "crash" in plan.kinds(0):  # until JAX ends it, a process that is stuck goes on asking
            most += HEARTBEAT / ASKS_EVERY
        if process.host.calls > most:
            yield f"process {process.host.number} sends {process.host.calls} messages; at most {most:.0f} are expected"


def _check_keys(plan: Plan, world: World, processes: list[Process]) -> Iterator[str]:
    """No key is left when all have gone, unless a process or a call was lost, or the service was silent for long."""
    lost = any(fault.kind in ("crash", "lost") for fault in plan.faults)
    lost = lost or any(process.left_keys for process in processes)  # a process that leaves waits 5 s for the service
    forgotten = tuple(
        f"{SubjectKeys(SUBJECT).absences_of(p.host.number)}/"
        for p in processes
        if FORGOTTEN in plan.kinds(p.host.number)
    )
    left = [key for key, _ in world.client.key_value_dir_get("") if not key.startswith(forgotten)]
    if left and not lost and not _long_silence(plan):
        yield f"keys are left: {left}"


def _check_final(plan: Plan, world: World, processes: list[Process]) -> Iterator[str]:
    """The next restore of living processes works, and removes what was left."""
    world.now = max(world.now, world.silent_until, *(process.host.stopped_until for process in processes))
    for process in processes:
        process.host.lose_after, process.host.slow_calls = -1, 0.0
        process.start(process.final())
    if not world.run(_LONGEST):
        yield "the last restore does not end"
    last = [process.records[-1] for process in processes if process.records and process.records[-1].restore == FINAL]
    failed = [record for record in last if record.error and not _ran_out(plan, record, last)]
    yield from (f"the last restore fails: {record}" for record in failed)
    if len(last) < len(processes):
        yield "the last restore does not end on all processes"
    if left := [key for key, _ in world.client.key_value_dir_get("")]:
        yield f"keys are left after the last restore: {left}"


def _long_silence(plan: Plan) -> bool:
    """Whether the service may be given up. Then a process can't know what the others see."""
    silent = [
        f for f in plan.faults if f.kind == "silence" or (f.kind in ("pause", "crash", "lost") and f.process == 0)
    ]
    # After the limit in all, those who have not been heard in a silence that began up to 3 s late are not waited for.
    longest = min(plan.stall + SILENCE, math.inf if plan.total is None else plan.total - 3)
    one_after_the_other = sum(fault.seconds for fault in silent)
    return one_after_the_other > longest or any(fault.kind in ("crash", "lost") for fault in silent)


def _left_behind(plan: Plan, records: list[Record]) -> set[int]:
    """Returns who came a moment after process 0 was interrupted while it waited, and told all who waited too.

    They find nobody, and may be a restore behind the others from then on.
    """
    told = [r for r in records if not r.process and not r.session and isinstance(r.error, InterruptError)]
    return {
        late.process
        for zero in told
        for late in records
        if late.restore == zero.restore
        if late.began > zero.ended - _MOMENT - _slow(plan)
    }


def shrink(plan: Plan) -> Run:
    """Returns a failing run with the fewest faults and processes that still fails."""
    failing = run(plan)
    while True:
        for candidate in smaller(failing.plan):
            tried = run(candidate)
            if tried.problems:
                failing = tried
                break
        else:
            return run(failing.plan, tracing=True)


def failing(seeds: Iterable[int]) -> Iterator[Run]:
    """Yields the runs that fail."""
    for seed in seeds:
        ended = run(random_plan(seed))
        if ended.problems:
            yield ended
