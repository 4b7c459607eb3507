"""Agreement between processes over the coordination service: a barrier, and the comparison behind `check=True`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_ext import errors
from orbax_ext import text as text_lib
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.placement import pieces

_TIMEOUT = 300.0
_LEAVES_PER_MEETING = 512  # digests that fit in one message, with room to spare
_SHOWN = 8
_NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # their unused bits in host memory mean nothing
_NO_LEAF = ("", "no such leaf")


def barrier(name: str, timeout: float = _TIMEOUT) -> None:
    """Waits until every process has called this with the same name, at most `timeout` seconds.

    It is not a collective: devices may be busy. A `MeetingTimeoutError` names the processes that did not arrive.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"barrier: expected a name, found {name!r}.")
    if not 0 < timeout < math.inf:
        raise ValueError(f"barrier: expected a timeout in seconds, above 0 and finite, found {timeout!r}.")
    with _session(f"barrier/{urllib.parse.quote(name, safe='')}", f"barrier {name!r}", timeout) as session:
        session.arrive({})


@dataclasses.dataclass(frozen=True)
class LeafFingerprint:
    """What a process sends to the others about one leaf."""

    name: str
    description: str  # shown if processes differ
    digest: str  # compared
    problem: str = ""  # an error that needs no comparison


def fingerprint(caller: str, name: str, leaf: Any) -> LeafFingerprint:
    """Returns the fingerprint of an array of which this process has a whole copy."""
    content = digest_of_array(pieces.host_copy(caller, name, leaf))
    return LeafFingerprint(name, f"shape {tuple(leaf.shape)}, dtype {leaf.dtype}, digest {content}", content)


def digest(*parts: bytes | memoryview) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def digest_of_array(data: np.ndarray[Any, Any]) -> str:
    """Returns the digest of shape, dtype and bytes: it differs between -0.0 and 0.0 and between NaNs."""
    plain = data.astype(np.float32) if data.dtype.name in _NARROW else data
    return digest(f"{data.shape} {data.dtype} ".encode(), *pieces.host_chunks(plain))


def require_same(caller: str, fingerprints: Iterable[LeafFingerprint], takes_part: bool = True) -> None:
    """Raises the same DataMismatchError on all processes unless all that take part have equal leaves without problems.

    Processes that agree send one digest of all their leaves. Only if they differ do they send one per leaf.
    """
    mine = list(fingerprints) if takes_part else []
    digests = [digest(leaf.name.encode(), leaf.digest.encode()) for leaf in mine]
    message = {
        "all": digest("".join(digests).encode()),
        "leaves": len(mine),
        "takes_part": takes_part,
        "problems": [(leaf.name, leaf.problem) for leaf in mine if leaf.problem][:_SHOWN],
    }
    with _session(f"agree/{caller}", f"the comparison in {caller}", _TIMEOUT) as session:
        messages = session.arrive(message)
        _raise_problems(caller, {process: sent["problems"] for process, sent in messages.items()}, session.hosts)
        compared = {process: sent for process, sent in sorted(messages.items()) if sent["takes_part"]}
        if len({sent["all"] for sent in compared.values()}) > 1:
            _raise_first_difference(caller, session, mine, digests, compared)


def _raise_problems(caller: str, problems: Mapping[int, Sequence[Sequence[str]]], hosts: Mapping[int, str]) -> None:
    leaves: dict[str, list[int]] = {}
    lines = []
    for process, of_process in sorted(problems.items()):
        for name, problem in of_process:
            leaves.setdefault(name, []).append(process)
            lines.append(f"leaf {name} on {text_lib.process(process, hosts)}: {problem}")
    if lines:
        raise errors.DataMismatchError(
            f"{caller}: copies differ that must be the same.\n  " + "\n  ".join(lines), leaves
        )


def _raise_first_difference(
    caller: str, session: Session, mine: Sequence[LeafFingerprint], digests: Sequence[str], compared: Mapping[int, Any]
) -> None:
    """Compares the leaves in steps; at the first step with differences, all processes describe those leaves."""
    longest = max(sent["leaves"] for sent in compared.values())
    absent = longest - len(mine)
    digests_or_none = [*digests, *[None] * absent]
    descriptions = [*((leaf.name, leaf.description) for leaf in mine), *[_NO_LEAF] * absent]
    for start in range(0, longest, _LEAVES_PER_MEETING):
        sent = session.meet("compare leaves", {"digests": digests_or_none[start : start + _LEAVES_PER_MEETING]})
        columns = zip(*(sent[process]["digests"] for process in compared), strict=True)
        different = [number for number, column in enumerate(columns, start) if len(set(column)) > 1][:_SHOWN]
        if different:
            described = session.meet("describe leaves", {"leaves": [descriptions[number] for number in different]})
            raise mismatch(caller, {process: described[process]["leaves"] for process in compared}, session.hosts)


def mismatch(
    caller: str, described: Mapping[int, Sequence[Sequence[str]]], hosts: Mapping[int, str]
) -> errors.DataMismatchError:
    """Returns the error for leaves that differ, given (name, description) of each leaf from each process.

    What most processes have is taken as expected.
    """
    lines, leaves = [], {}
    for number in range(len(next(iter(described.values())))):
        by_process = {process: tuple(described[process][number]) for process in sorted(described)}
        (name, expected), _ = collections.Counter(by_process.values()).most_common(1)[0]
        odd = [process for process, pair in by_process.items() if pair != (name, expected)]
        name = name or next(other for other, _ in by_process.values() if other)
        leaves[name] = odd
        lines.append(f"leaf {name}: expected {expected} (as on most processes, or the lowest)")
        lines += [_difference(name, text_lib.process(process, hosts), *by_process[process]) for process in odd[:_SHOWN]]
        if len(odd) > _SHOWN:
            lines.append(f"  and {len(odd) - _SHOWN} more")
    return errors.DataMismatchError(
        f"{caller}: processes hold different data where it must be the same.\n  "
        + "\n  ".join(lines)
        + "\nMake every process load or compute the same values (same seed, same file), or send one process's copy.",
        leaves,
    )


def _difference(name: str, process: str, found_name: str, description: str) -> str:
    other = f"leaf {found_name}, " if found_name not in ("", name) else ""
    return f"  {process}: found {other}{description}"


@contextlib.contextmanager
def _session(subject: str, title: str, timeout: float) -> Iterator[Session]:
    """Opens a meeting of all processes of the job."""
    limits = Limits(stall=timeout, total=timeout)
    try:
        with open_session(f"placement/{subject}", limits) as session:
            yield session
    except errors.RestoreTimeoutError as error:
        raise errors.MeetingTimeoutError(
            f"{title}: process {jax.process_index()} of {jax.process_count()} waited {timeout:g} s; still missing: "
            f"{text_lib.processes(error.missing, {})}. Expected every process to make the same call: look for an error "
            "there, or another path taken; give more time if they are only slow.",
            error.missing,
        ) from error
