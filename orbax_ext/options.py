"""Every knob of a restore, in one frozen and validated dataclass. Knobs that Orbax has keep Orbax's names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_args

F = TypeVar("F", bound=Callable[..., Any])
DEPRECATED = ("storage_gbps", "fabric_gbps")  # knobs that are accepted and have no effect
Strategy = Literal["auto", "spread", "single", "direct"]


@dataclasses.dataclass(frozen=True)
class Options:
    """How to restore. The defaults need no change on most clusters.

    Attributes:
      replica_axis: The mesh axis, or axes, along which the state is replicated: a name, an index, or several. By
        default all mesh axes that no leaf of that mesh is sharded over.
      replica_axis_index: The same as an index, by Orbax's name.
      primary_replica_id: Which replica reads if only one does, counted along the replica axis.
      strategy: "spread": every replica reads a disjoint share and all receive the rest; "single": one replica reads and
        the others receive; "direct": every process reads what it needs, as plain Orbax does; "auto": "spread"
        from the front and "direct" from the back, whenever storage would be idle, until both meet.
      storage_gbps: Deprecated, has no effect: "auto" needs no rates.
      fabric_gbps: Deprecated, has no effect: "auto" needs no rates.
      broadcast_memory_limit_bytes: Bytes per device that may be under way at a time, read but not yet in place; by
        default about an eighth of the state, from 64 to 256 MiB, or less if less is free. All processes use the
        smallest value among them.
      broadcast_memory_scaling_factor: The share of a device's free memory that the default above may take.
      request_concurrency: Requests to s3:// or gs:// that a process has under way at a time; by default what
        TensorStore's own settings say, or else 128 at first, more while reads get faster by it, and fewer when storage
        refuses requests.
      stall_timeout: Seconds without progress of any process after which the restore fails on all of them.
      timeout: Seconds in total after which the restore fails on all processes; None for no limit.
      stall_seconds: Seconds after which a connection to gs:// or s3:// counts as broken if it brings less than
        `stall_rate`; it is closed, and the request is sent again. By default what
        `enable_s3` was given for s3://, otherwise a fifth of `stall_timeout`.
      stall_rate: Bytes per second that a connection brings at least.
      late_seconds: Seconds that the other processes wait for one that is late with its reads, or longer if they
        needed longer themselves or can read later parts meanwhile; then other replicas read its part. `math.inf` turns
        that off.
      strict_readers: Raise a read error of one process on all of them, instead of letting other replicas read its part.
      verify: Compare digests of the restored arrays across replicas, and with those stored beside the checkpoint.
      progress: Show the progress on process 0: a bar in a terminal, otherwise a log line every few seconds.
    """

    replica_axis: str | int | Sequence[str | int] | None = None
    replica_axis_index: int | None = None
    primary_replica_id: int | None = 0
    strategy: Strategy = "auto"
    storage_gbps: float | None = None
    fabric_gbps: float | None = None
    broadcast_memory_limit_bytes: int | None = None
    broadcast_memory_scaling_factor: float | None = 0.75
    request_concurrency: int | None = None
    stall_timeout: float = 300.0
    timeout: float | None = None
    stall_seconds: float | None = None
    stall_rate: int = 4096
    late_seconds: float = 0.5
    strict_readers: bool = False
    verify: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if self.replica_axis is not None and self.replica_axis_index is not None:
            raise ValueError(
                f"Give replica_axis or replica_axis_index, not both: found replica_axis={self.replica_axis!r} and "
                f"replica_axis_index={self.replica_axis_index!r}."
            )
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy must be one of {', '.join(get_args(Strategy))}; found {self.strategy!r}.")
        if self.primary_replica_id is not None and self.primary_replica_id < 0:
            raise ValueError(f"primary_replica_id must be 0 or more; found {self.primary_replica_id}.")
        limit = self.broadcast_memory_limit_bytes
        if limit is not None and limit <= 0:
            raise ValueError(f"broadcast_memory_limit_bytes must be positive; found {limit}.")
        factor = self.broadcast_memory_scaling_factor
        if factor is not None and not 0 < factor <= 1:
            raise ValueError(f"broadcast_memory_scaling_factor must be above 0 and at most 1; found {factor}.")
        requests = self.request_concurrency
        if requests is not None and requests <= 0:
            raise ValueError(f"request_concurrency must be 1 or more, or None; found {requests}.")
        for name in DEPRECATED:
            if getattr(self, name) is not None:
                message = f"{name} has no effect any more: `auto` needs no rates. It will be refused from 0.3.0 on."
                # Python shows a DeprecationWarning only where the program itself calls, and here a dataclass does.
                warnings.warn(message, FutureWarning, stacklevel=2)
        if self.stall_timeout <= 0:
            raise ValueError(f"stall_timeout must be a positive number of seconds; found {self.stall_timeout}.")
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError(f"timeout must be a positive number of seconds or None; found {self.timeout}.")
        if self.stall_seconds is not None and self.stall_seconds <= 0:
            raise ValueError(f"stall_seconds must be a positive number of seconds or None; found {self.stall_seconds}.")
        if self.stall_rate < 1:
            raise ValueError(f"stall_rate must be at least 1 byte per second; found {self.stall_rate}.")
        if not self.late_seconds > 0:
            raise ValueError(f"late_seconds must be a positive number of seconds; found {self.late_seconds}.")

    @property
    def axes(self) -> tuple[str | int, ...] | None:
        """The replica axes as the user gave them, or None where they follow from the leaves."""
        if self.replica_axis_index is not None:
            return (self.replica_axis_index,)
        if self.replica_axis is None:
            return None
        if isinstance(self.replica_axis, (str, int)):
            return (self.replica_axis,)
        return tuple(self.replica_axis)

    def must_agree(self) -> dict[str, Any]:
        """Returns the knobs that shape the plan, which must be the same on every process."""
        return {
            "replica axes": self.axes,
            "primary_replica_id": self.primary_replica_id,
            "strategy": self.strategy,
            "verify": self.verify,
        }


class Knobs(TypedDict, total=False):
    """The keyword arguments of `register` and of everything else that takes knobs, for editors and type checkers.

    A test holds it equal to the fields of `Options`. A dict of knobs has only those that were given.
    """

    replica_axis: str | int | Sequence[str | int] | None
    replica_axis_index: int | None
    primary_replica_id: int | None
    strategy: Strategy
    storage_gbps: float | None
    fabric_gbps: float | None
    broadcast_memory_limit_bytes: int | None
    broadcast_memory_scaling_factor: float | None
    request_concurrency: int | None
    stall_timeout: float
    timeout: float | None
    stall_seconds: float | None
    stall_rate: int
    late_seconds: float
    strict_readers: bool
    verify: bool
    progress: bool


FIELDS = tuple(field.name for field in dataclasses.fields(Options))
STOCK_FIELDS = (  # the knobs of Orbax's SingleReplicaArrayHandler, in the order of its positional arguments
    "replica_axis_index",
    "primary_replica_id",
    "broadcast_memory_limit_bytes",
    "broadcast_memory_scaling_factor",
)


def require_known(names: Iterable[str], others: Collection[str] = ()) -> None:
    """Raises TypeError for a name that is neither a knob nor one of `others`, and names the most similar one."""
    for name in names:
        if name not in FIELDS and name not in others:
            similar = difflib.get_close_matches(name, [*FIELDS, *others], n=1)
            remedy = f"; did you mean {similar[0]!r}?" if similar else "."
            raise TypeError(f"unknown knob {name!r}{remedy} The knobs are {', '.join(FIELDS)}.")


def with_knobs_in_signature(function: F) -> F:
    """Makes `help()` and notebooks show the knobs and their defaults instead of `**knobs`."""
    signature = inspect.signature(function)
    before = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    knobs = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(Options)
    ]
    others = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD, annotation=Any)
    function.__signature__ = signature.replace(parameters=[*before, *knobs, others])  # type: ignore[attr-defined]
    return function
