"""Restores the newest step that every process can restore.

After each attempt the processes exchange their outcomes: a step counts only if all processes restored it. A process
may fail before orbax_ext's own meetings, for example because Orbax finds no such step on its disk. It then announces
its absence to those who wait there, and withdraws that when all have seen the outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

from orbax_ext import errors, text
from orbax_ext.meeting.session import Limits, gather, last_answer, open_session, tell_absent, withdraw_absent
from orbax_ext.meeting.threads import within
from orbax_ext.meeting.wire import MAX_ERROR, Contribution, failure_to_json, failures_from_json
from orbax_ext.upstream.steps import COMMIT_FILE, steps_without_commit

_MOST_STEPS = 2000  # that are tried: their numbers fit into one contribution to a meeting
_SUBJECT = "fallback"
# Not the fault of the step: an older one would fail in the same way.
_NOT_ABOUT_THE_STEP = (errors.PlanMismatchError, errors.RestoreTimeoutError)


@dataclasses.dataclass(frozen=True)
class ValidRestore:
    """The restored state, its step, and the steps that were tried before it."""

    step: int
    state: Any
    skipped: Mapping[int, str]  # why each of these failed, in the order they were tried


def restore_latest_valid(
    manager: Any,
    args: Any = None,
    *,
    steps: Sequence[int] | None = None,
    stall_timeout: float = 300.0,
    timeout: float | None = None,
    **restore_kwargs: Any,
) -> ValidRestore:
    """Restores the newest step that every process can restore; tries one step after the other.

    Reloads the manager first, so that it knows steps of other jobs and forgets steps that were never finished. A step
    without its commit file is skipped without an attempt.

    Args:
      manager: A `CheckpointManager`.
      args: The `args` of `manager.restore`.
      steps: The steps to try, in this order; by default all steps that process 0 sees, newest first.
      stall_timeout: Seconds without progress of any process after which the exchange of outcomes is given up, and
        seconds that listing the steps may take. The attempts themselves have the limits of the registered handler.
      timeout: Seconds in all that one exchange of outcomes may take.
      **restore_kwargs: Passed on to `manager.restore`.

    Raises:
      RestoreError: No step could be restored; the message has the reason for each.
    """
    limits = Limits(stall_timeout, timeout)
    agreed, unfinished = _agree_on_steps(manager, steps, limits)
    skipped: dict[int, str] = {}
    for step in agreed:
        if step in unfinished:
            reason = f"its commit file {COMMIT_FILE} is missing: the save of this step did not finish"
        else:
            state, reason = _attempt(manager, step, args, restore_kwargs, limits)
        if not reason:
            return ValidRestore(step, state, skipped)
        logging.warning("orbax_ext: skipping step %d: %s", step, reason)
        skipped[step] = reason
    if not skipped:
        raise errors.RestoreError(f"there is no step to restore in {manager.directory}")
    lines = "\n".join(f"step {step}: {reason}" for step, reason in skipped.items())
    tried = text.count(len(skipped), "step")
    raise errors.RestoreError(f"tried {tried} in {manager.directory} and could restore none:\n{lines}")


def _agree_on_steps(manager: Any, steps: Sequence[int] | None, limits: Limits) -> tuple[list[int], set[int]]:
    """Returns the steps to try and those of them without a commit file, as process 0 sees them.

    An error of one process is raised on all of them.
    """
    mine: Contribution
    try:
        mine = within(limits.silence, "list steps", lambda: _steps_here(manager, steps), last_answer)
    except errors.RestoreError:  # raised on all processes already
        raise
    except Exception as error:
        mine = failure_to_json(error)
    arrivals = gather(_SUBJECT, mine, limits)
    hosts = {process: str(arrival["host"]) for process, arrival in arrivals.items()}
    if failed := failures_from_json(arrivals, hosts, "list steps"):
        raise errors.restore_failed(failed)
    return list(arrivals[0]["steps"]), set(arrivals[0]["unfinished"])


def _steps_here(manager: Any, steps: Sequence[int] | None) -> dict[str, list[int]]:
    manager.reload()
    listed = [int(step) for step in manager.all_steps()]
    unfinished = steps_without_commit(manager, listed) if jax.process_index() == 0 else []
    chosen = sorted({*listed, *unfinished}, reverse=True) if steps is None else [int(step) for step in steps]
    chosen = chosen[:_MOST_STEPS]
    return {"steps": chosen, "unfinished": [step for step in unfinished if step in chosen]}


def _attempt(manager: Any, step: int, args: Any, restore_kwargs: Mapping[str, Any], limits: Limits) -> tuple[Any, str]:
    """Returns the state, or the reason why this step could not be restored, which is the same on all processes."""
    state, outcome = None, {}
    try:
        state = manager.restore(step, args=args, **restore_kwargs)
    except _NOT_ABOUT_THE_STEP:
        raise
    except errors.RestoreFailedError as error:
        outcome = {"shared": str(error)[:MAX_ERROR]}
    except Exception as error:
        outcome = failure_to_json(error)
        tell_absent("restore", error)
    with open_session(_SUBJECT, limits) as session:
        try:
            outcomes = session.arrive(outcome)
        finally:  # also if this meeting fails or is interrupted: in the next restore the announcement would be wrong
            withdraw_absent("restore")
        session.meet("next")
    return state, _reason(outcomes, session.hosts)


def _reason(outcomes: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> str:
    """Returns why an attempt failed, from the outcomes of all processes; "" if it did not."""
    failed = failures_from_json(outcomes, hosts, "restore")
    if failed:
        return str(errors.RestoreFailedError(failed))
    shared = sorted({str(outcome["shared"]) for outcome in outcomes.values() if "shared" in outcome})
    return "\n".join(shared)
