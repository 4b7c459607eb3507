"""Restore the newest step that can be restored, with all processes deciding alike.

After each attempt all processes exchange how it went: a step counts only if it was restored everywhere. A process that
fails before it comes to orbax_ext's own meetings (Orbax found no such step on its disk, say) leaves a note for those
who wait there, and takes it back when all have seen the outcome.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from orbax_ext import errors
from orbax_ext.meeting.session import Limits, gather, open_session, tell_absent, withdraw_absent
from orbax_ext.meeting.wire import MAX_ERROR, failures, to_payload

_MOST_STEPS = 2000  # that are tried
_SUBJECT = "fallback"
# Not the checkpoint's fault: an older step would end in the same way.
_NOT_ABOUT_THE_STEP = (errors.PlanMismatchError, errors.RestoreTimeoutError)


@dataclasses.dataclass(frozen=True)
class ValidRestore:
    """What was restored, and what had to be skipped for it."""

    step: int
    state: Any
    skipped: Mapping[int, str]  # step: why, the newest first


def restore_latest_valid(
    manager: Any,
    args: Any = None,
    *,
    steps: Sequence[int] | None = None,
    stall_timeout: float = 300.0,
    timeout: float | None = None,
    **restore_kwargs: Any,
) -> ValidRestore:
    """Restores the newest step that every process can restore, trying one after the other.

    Args:
      manager: A `CheckpointManager`.
      args: What `manager.restore` takes.
      steps: The steps to try, best first; by default all that process 0 sees, newest first.
      stall_timeout: Seconds without any process's progress after which to give up, between attempts. Attempts have the
        limits of the registered handler.
      timeout: Seconds in all that one exchange of outcomes may take.
      **restore_kwargs: Passed on to `manager.restore`.

    Raises:
      RestoreError: No step could be restored; names all and says why.
    """
    limits = Limits(stall_timeout, timeout)
    seen = sorted(manager.all_steps(read=True), reverse=True) if steps is None else list(steps)
    agreed = gather(_SUBJECT, {"steps": [int(step) for step in seen[:_MOST_STEPS]]}, limits)[0]["steps"]
    skipped: dict[int, str] = {}
    for step in agreed:
        state, reason = _attempt(manager, int(step), args, restore_kwargs, limits)
        if not reason:
            return ValidRestore(int(step), state, skipped)
        logging.warning("orbax_ext: step %d is skipped: %s", step, reason)
        skipped[int(step)] = reason
    if not skipped:
        raise errors.RestoreError(f"there is no step to restore in {manager.directory}")
    lines = "\n".join(f"step {step}: {reason}" for step, reason in skipped.items())
    raise errors.RestoreError(f"none of {len(skipped)} steps in {manager.directory} could be restored:\n{lines}")


def _attempt(manager: Any, step: int, args: Any, restore_kwargs: Mapping[str, Any], limits: Limits) -> tuple[Any, str]:
    """The state, or why this step is not to be had, the same on all processes."""
    state, mine = None, {}
    try:
        state = manager.restore(step, args=args, **restore_kwargs)
    except _NOT_ABOUT_THE_STEP:
        raise
    except errors.RestoreFailedError as error:
        mine = {"shared": str(error)[:MAX_ERROR]}
    except Exception as error:
        mine = to_payload(error)
        tell_absent("restore", error)
    with open_session(_SUBJECT, limits) as session:
        outcomes = session.arrive(mine)
        # All have ended their attempt, so nobody needs the note any more; nobody may find it in the next one.
        withdraw_absent("restore")
        session.meet("next")
    return state, _reason(outcomes, session.hosts)


def _reason(outcomes: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> str:
    """Why an attempt failed, from what all processes brought; empty if it did not."""
    failed = failures(outcomes, hosts, "restore")
    if failed:
        return str(errors.RestoreFailedError(failed))
    shared = sorted({str(outcome["shared"]) for outcome in outcomes.values() if "shared" in outcome})
    return "\n".join(shared)
