"""What a restore can raise.

    RestoreError
      RestoreFailedError    a process failed; the same error is raised on all, naming it. Where all that failed
                            raised the same built-in type, it is of that type too: `except ValueError` catches it
      RestoreTimeoutError   processes did not arrive or stopped advancing; they are named
      PlanMismatchError     the processes do not agree on what to restore

Beside a restore, in `orbax_ext.placement`:

    MeetingTimeoutError     a TimeoutError: processes did not come to a barrier or a comparison; they are named
    DataMismatchError       a ValueError: processes hold different data where it must be the same

Bad arguments are plain `ValueError`s that say what was expected, what was found and what to do.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
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
    kind: str = ""  # the built-in exception that it is, such as "ValueError"


class RestoreFailedError(RestoreError):
    """One or several processes failed. `.failures` maps process index to `ProcessFailure`."""

    def __init__(self, failures: Mapping[int, ProcessFailure]) -> None:
        self.failures = dict(sorted(failures.items()))
        super().__init__(f"restore failed on {_count(self.failures)}:\n  " + "\n  ".join(self._lines()))

    def __str__(self) -> str:  # not KeyError's, which quotes
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:  # its class may be one that has no name to be found by
        return restore_failed, (self.failures,)

    def _lines(self, most: int = 8) -> list[str]:
        """One line for each different failure, with the processes that had it."""
        alike: dict[tuple[str, str], list[str]] = {}
        for process, failure in self.failures.items():
            alike.setdefault((failure.phase, failure.error), []).append(f"{process} ({failure.host})")
        return [
            f"process {', '.join(names[:most])}{' and others' if names[most:] else ''}, in phase {phase!r}: {error}"
            for (phase, error), names in alike.items()
        ]


def restore_failed(failures: Mapping[int, ProcessFailure]) -> RestoreFailedError:
    """A `RestoreFailedError`, also of the built-in type that all failures have in common if there is one."""
    kinds = {failure.kind for failure in failures.values()}
    if len(kinds) == 1:
        try:
            return _also(kinds.pop())(failures)
        except TypeError:  # a type that can't be made from a message, such as UnicodeDecodeError
            pass
    return RestoreFailedError(failures)


def builtin_kind(error: BaseException) -> str:
    """The name of the most special built-in exception that an error is."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == builtins.__name__)


@functools.cache
def _also(kind: str) -> type[RestoreFailedError]:
    # The name comes from another process: it may only ever choose among the built-in exceptions.
    found = getattr(builtins, kind, None)
    if not (isinstance(found, type) and issubclass(found, Exception)) or found is Exception:
        return RestoreFailedError
    return type(RestoreFailedError.__name__, (RestoreFailedError, found), {"__module__": __name__})


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


class MeetingTimeoutError(TimeoutError):
    """Processes did not come to a meeting of user code in time. `.missing` has their indices."""

    def __init__(self, message: str, missing: Collection[int]) -> None:
        self.missing = tuple(sorted(missing))
        super().__init__(message)


class DataMismatchError(ValueError):
    """Processes differ in data that must be the same. `.leaves` maps leaf to the processes that differ."""

    def __init__(self, message: str, leaves: Mapping[str, Collection[int]]) -> None:
        self.leaves = {leaf: tuple(sorted(processes)) for leaf, processes in leaves.items()}
        super().__init__(message)


def _count(items: Collection[object]) -> str:
    return "1 process" if len(items) == 1 else f"{len(items)} processes"
