"""What a restore can raise.

    RestoreError
      RestoreFailedError    a process failed; the same error is raised on all, naming it
      RestoreTimeoutError   processes did not arrive or stopped advancing; they are named
      PlanMismatchError     the processes do not agree on what to restore

Bad arguments are plain `ValueError`s that say what was expected, what was found and what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping


class RestoreError(Exception):
    """A restore ended without a state, on every process."""


@dataclasses.dataclass(frozen=True)
class ProcessFailure:
    """What went wrong on one process."""

    host: str
    phase: str  # the step of the restore it was in
    error: str  # "ValueError: ..."
    traceback: str = ""

    def __str__(self) -> str:
        return f"on {self.host}, in phase {self.phase!r}: {self.error}"


class RestoreFailedError(RestoreError):
    """One or several processes failed. `.failures` maps process index to `ProcessFailure`."""

    def __init__(self, failures: Mapping[int, ProcessFailure]) -> None:
        self.failures = dict(sorted(failures.items()))
        lines = [f"process {process} {failure}" for process, failure in self.failures.items()]
        super().__init__(f"restore failed on {_count(lines, 'process')}:\n  " + "\n  ".join(lines))


class RestoreTimeoutError(RestoreError):
    """Processes were waited for in vain. `.missing` has their indices, `.phases` what was last heard of each."""

    def __init__(self, message: str, missing: Collection[int], phases: Mapping[int, str]) -> None:
        self.missing = tuple(sorted(missing))
        self.phases = dict(phases)
        super().__init__(message)


class PlanMismatchError(RestoreError):
    """Processes asked for different things. `.digests` maps process index to the digest of what it asked for."""

    def __init__(self, message: str, digests: Mapping[int, str]) -> None:
        self.digests = dict(sorted(digests.items()))
        super().__init__(message)


def _count(items: Collection[object], noun: str) -> str:
    return f"1 {noun}" if len(items) == 1 else f"{len(items)} {noun}es"
