"""The messages between the parent and the processes of a local cluster. Pickle is safe: we start both ends."""

from __future__ import annotations

import dataclasses
import importlib
import operator
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

_MAIN_ALIAS = "__orbax_ext_lab_main__"  # so that `if __name__ == "__main__"` does not run again in the processes
LONGEST_MESSAGE = 1 << 18  # bytes to and from the fork server: what the system allows. An environment is the largest


@dataclasses.dataclass(frozen=True)
class Fork:
    """A request to the fork server for a process. The descriptors of its channel and its log travel with it.

    The server answers with the process's number. A message of that number alone asks for its exit code, None if it
    still runs.
    """

    environment: Mapping[str, str]
    directory: str
    devices: int


@dataclasses.dataclass(frozen=True)
class Setup:
    """The first message to a process: its rank, and where the other processes are."""

    rank: int
    processes: int
    coordinator: str
    sys_path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to call, by name."""

    module: str
    qualname: str
    main_path: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception as text: the exception itself may hold objects that can't be pickled."""

    type: str  # the class's name, such as "ValueError"
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


def describe_function(function: Callable[..., Any]) -> tuple[str, str, str | None]:
    """Returns the module, the qualified name, and the path of the main script if the function is defined there."""
    module, qualname = function.__module__, function.__qualname__
    if "<" in qualname:
        raise ValueError(f"{qualname} can't be sent to a cluster: it must be a module's own function, found by name.")
    main_path = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
    if module == "__main__" and main_path is None:
        raise ValueError(f"{qualname} can't be sent to a cluster: put it in a file (it was defined interactively).")
    return module, qualname, main_path


def find_function(job: Job) -> Callable[..., Any]:
    """Returns the function that `describe_function` described."""
    if job.main_path is None:
        home = importlib.import_module(job.module)
    else:
        if _MAIN_ALIAS not in sys.modules:
            module = type(sys)(_MAIN_ALIAS)
            module.__dict__.update(runpy.run_path(job.main_path, run_name=_MAIN_ALIAS))
            sys.modules[_MAIN_ALIAS] = module
        home = sys.modules[_MAIN_ALIAS]
    function: Callable[..., Any] = operator.attrgetter(job.qualname)(home)
    return function
