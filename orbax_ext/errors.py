"""The exceptions of this package.

A restore raises, on all processes:

    RestoreError
      RestoreFailedError    a process failed; the message names it. The error also has the most specific built-in type
                            that the errors of all failed processes share: `except ValueError` catches it
      RestoreTimeoutError   processes did not arrive or stopped advancing; the message names them
      PlanMismatchError     the processes do not agree on what to restore

The functions of `orbax_ext.placement` raise:

    MeetingTimeoutError     a TimeoutError: processes did not arrive at a barrier or a comparison; it names them
    DataMismatchError       a ValueError: processes hold different data where it must be the same

Bad arguments are plain `ValueError`s with what was expected, what was found and what to do.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
from collections.abc import Collection, Mapping

from orbax_ext import text


class RestoreError(Exception):
    """A restore failed, on every process. `.remark` has what else there is to know on this one, if anything."""

    remark = ""

    def __str__(self) -> str:  # `KeyError.__str__`, of a restore that failed with one, would quote the message
        message = super().__str__() if len(self.args) != 1 else str(self.args[0])
        return f"{message}\n{self.remark}" if self.remark else message


@dataclasses.dataclass(frozen=True)
class ProcessFailure:
    """The error of one process."""

    host: str
    phase: str  # the step of the restore in which it happened
    error: str  # "ValueError: ..."
    traceback: str = ""
    kind: str = ""  # its built-in type, such as "ValueError"


class RestoreFailedError(RestoreError):
    """One or more processes failed. `.failures` maps process index to `ProcessFailure`."""

    def __init__(self, failures: Mapping[int, ProcessFailure]) -> None:
        self.failures = dict(sorted(failures.items()))
        count = text.count(len(self.failures), "process")
        super().__init__(f"restore failed on {count}:\n  " + "\n  ".join(self._lines()))

    def __reduce__(self) -> tuple[object, ...]:  # pickle can't find the classes that `restore_failed` makes
        return restore_failed, (self.failures,), {"remark": self.remark}

    def _lines(self) -> list[str]:
        """Returns one line for each distinct error, with the processes that raised it."""
        hosts = {process: failure.host for process, failure in self.failures.items()}
        processes: dict[tuple[str, str], list[int]] = {}
        for process, failure in self.failures.items():
            processes.setdefault((failure.phase, failure.error), []).append(process)
        return [
            f"{text.processes(numbers, hosts)}, in phase {phase!r}: {error}"
            for (phase, error), numbers in processes.items()
        ]


def restore_failed(failures: Mapping[int, ProcessFailure]) -> RestoreFailedError:
    """Returns a `RestoreFailedError` that also has the built-in type that all failures share, if there is one."""
    for kind in _shared_kinds({failure.kind for failure in failures.values()}):
        try:
            return _failed_type(kind.__name__)(failures)
        except TypeError:  # a type that can't be made from a message, such as UnicodeDecodeError
            pass
    return RestoreFailedError(failures)


def add_remark(error: BaseException, remark: str) -> None:
    """Adds a line to the message of a `RestoreError`, or a note to another error."""
    if isinstance(error, RestoreError):
        error.remark = f"{error.remark}\n{remark}".lstrip()
    else:
        error.add_note(remark)


def builtin_kind(error: BaseException) -> str:
    """Returns the name of the most specific built-in type of an error."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == builtins.__name__)


def _shared_kinds(names: Collection[str]) -> list[type[Exception]]:
    """Returns the built-in exceptions that all of these are, the most specific first."""
    kinds = [getattr(builtins, name, None) for name in names]
    # The names come from other processes, so only built-in exceptions are accepted.
    exceptions = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)]
    if not exceptions or len(exceptions) < len(kinds):
        return []
    specific = [kind for kind in exceptions[0].__mro__ if issubclass(kind, Exception) and kind is not Exception]
    return [kind for kind in specific if all(issubclass(other, kind) for other in exceptions)]


@functools.cache
def _failed_type(builtin: str) -> type[RestoreFailedError]:
    kinds = (RestoreFailedError, getattr(builtins, builtin))
    return type(RestoreFailedError.__name__, kinds, {"__module__": __name__})


class RestoreTimeoutError(RestoreError):
    """Some processes did not arrive in time. `.missing` has their indices, `.phases` the last report of each."""

    def __init__(self, message: str, missing: Collection[int], phases: Mapping[int, str]) -> None:
        self.missing = tuple(sorted(missing))
        self.phases = dict(phases)
        super().__init__(message)


class PlanMismatchError(RestoreError):
    """The processes do not agree on what to restore. `.digests` maps process index to what it has where they differ."""

    def __init__(self, message: str, digests: Mapping[int, str]) -> None:
        self.digests = dict(sorted(digests.items()))
        super().__init__(message)


class MeetingTimeoutError(TimeoutError):
    """Some processes did not arrive at a meeting of user code in time. `.missing` has their indices."""

    def __init__(self, message: str, missing: Collection[int]) -> None:
        self.missing = tuple(sorted(missing))
        super().__init__(message)


class DataMismatchError(ValueError):
    """Processes hold different data where it must be the same. `.leaves` maps leaf to the processes that differ."""

    def __init__(self, message: str, leaves: Mapping[str, Collection[int]]) -> None:
        self.leaves = {leaf: tuple(sorted(processes)) for leaf, processes in leaves.items()}
        super().__init__(message)
