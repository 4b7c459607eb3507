"""Agreement between processes over the coordination service: a barrier, and the comparison of what each holds."""

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
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.placement import pieces

_TIMEOUT = 300.0
_LEAVES_PER_MEETING = 512  # digests that fit in one message, with room to spare
_SHOWN = 8
_NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # whose unused bits in host memory mean nothing


def barrier(name: str, timeout: float = _TIMEOUT) -> None:
    """Waits until every process has called this with the same name, at most `timeout` seconds.

    It is not a collective: devices may be busy. A `MeetingTimeoutError` names the processes that did not come.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"barrier: expected a name, found {name!r}.")
    if not 0 < timeout < math.inf:
        raise ValueError(f"barrier: expected a timeout in seconds, above 0 and finite, found {timeout!r}.")
    with _session(f"barrier/{urllib.parse.quote(name, safe='')}", f"barrier {name!r}", timeout) as session:
        session.arrive({})


@dataclasses.dataclass(frozen=True)
class Item:
    """What a process says of one leaf."""

    name: str
    words: str  # for when it differs
    digest: str  # to be compared
    fault: str = ""  # what is wrong with it whatever the others say


def described(what: str, name: str, leaf: Any) -> Item:
    """The item of a whole array that this process has a copy of."""
    found = digest_of_array(pieces.host_copy(what, name, leaf))
    return Item(name, f"shape {tuple(leaf.shape)}, dtype {leaf.dtype}, digest {found}", found)


def digest(*parts: bytes | memoryview) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def digest_of_array(data: np.ndarray[Any, Any]) -> str:
    """Of shape, dtype and bytes, so that it tells -0.0 from 0.0 and one NaN from another."""
    plain = data.astype(np.float32) if data.dtype.name in _NARROW else data
    return digest(f"{data.shape} {data.dtype} ".encode(), *pieces.host_chunks(plain))


def require_same(what: str, items: Iterable[Item], concerned: bool = True) -> None:
    """Raises the same DataMismatchError on all processes unless all that are concerned bring the same sound items.

    One message of one digest each when they agree; more only to find out where they do not.
    """
    mine = list(items) if concerned else []
    faults = [(item.name, item.fault) for item in mine if item.fault][:_SHOWN]
    marks = [digest(item.name.encode(), item.digest.encode()) for item in mine]
    news = {"all": digest("".join(marks).encode()), "leaves": len(mine), "concerned": concerned, "faults": faults}
    with _session(f"agree/{what}", f"the comparison in {what}", _TIMEOUT) as session:
        said = session.arrive(news)
        _raise_faults(what, {process: payload["faults"] for process, payload in said.items()}, session.hosts)
        compared = sorted(process for process, payload in said.items() if payload["concerned"])
        if len({said[process]["all"] for process in compared}) > 1:
            longest = max(said[process]["leaves"] for process in compared)
            _raise_first_difference(what, session, mine, marks, compared, longest)


def _raise_faults(what: str, faults: Mapping[int, Sequence[Sequence[str]]], hosts: Mapping[int, str]) -> None:
    leaves: dict[str, list[int]] = {}
    lines = []
    for process, found in sorted(faults.items()):
        for name, fault in found:
            leaves.setdefault(name, []).append(process)
            lines.append(f"leaf {name} on process {process} ({hosts[process]}): {fault}")
    if lines:
        raise errors.DataMismatchError(f"{what}: copies differ that must be the same.\n  " + "\n  ".join(lines), leaves)


def _raise_first_difference(
    what: str,
    session: Session,
    mine: Sequence[Item],
    marks: Sequence[str],
    compared: Sequence[int],
    longest: int,
) -> None:
    for start in range(0, longest, _LEAVES_PER_MEETING):
        window = range(start, min(start + _LEAVES_PER_MEETING, longest))
        said = session.meet("compare leaves", {"marks": [_at(marks, number) for number in window]})
        columns = {number: [said[process]["marks"][number - start] for process in compared] for number in window}
        different = [number for number, column in columns.items() if len(set(column)) > 1][:_SHOWN]
        if different:
            words = session.meet("describe leaves", {"items": [_words(_at(mine, number)) for number in different]})
            found = {process: words[process]["items"] for process in compared}
            raise mismatch(what, found, session.hosts)


def _at(sequence: Sequence[Any], number: int) -> Any:
    return sequence[number] if number < len(sequence) else None


def _words(item: Item | None) -> list[str]:
    return ["", "no such leaf"] if item is None else [item.name, item.words]


def mismatch(
    what: str, said: Mapping[int, Sequence[Sequence[str]]], hosts: Mapping[int, str]
) -> errors.DataMismatchError:
    """The error for what each process said of the leaves that differ: a name and words. Most are taken as right."""
    lines, leaves = [], {}
    for number in range(len(next(iter(said.values())))):
        of_process = {process: tuple(said[process][number]) for process in sorted(said)}
        (name, expected), _ = collections.Counter(of_process.values()).most_common(1)[0]
        odd = [process for process, found in of_process.items() if found != (name, expected)]
        name = name or next(other for other, _ in of_process.values() if other)
        leaves[name] = odd
        lines.append(f"leaf {name}: expected {expected} (as on most processes, or the lowest)")
        for process in odd[:_SHOWN]:
            other, found = of_process[process]
            moved = f"leaf {other}, " if other not in ("", name) else ""
            lines.append(f"  process {process} ({hosts.get(process, 'host unknown')}): found {moved}{found}")
        if len(odd) > _SHOWN:
            lines.append(f"  and {len(odd) - _SHOWN} more processes")
    return errors.DataMismatchError(
        f"{what}: processes hold different data where it must be the same.\n  "
        + "\n  ".join(lines)
        + "\nMake every process load or compute the same values (same seed, same file), or send one process's copy.",
        leaves,
    )


@contextlib.contextmanager
def _session(subject: str, title: str, timeout: float) -> Iterator[Session]:
    """A meeting of all processes of the job."""
    limits = Limits(stall=timeout, total=timeout)
    try:
        with open_session(f"placement/{subject}", limits) as session:
            yield session
    except errors.RestoreTimeoutError as error:
        missing = ", ".join(str(process) for process in error.missing)
        raise errors.MeetingTimeoutError(
            f"{title}: process {jax.process_index()} of {jax.process_count()} waited {timeout:g} s; still missing: "
            f"process {missing}. Expected every process to make the same call: look for an error there, or another "
            "path taken; give more time if they are only slow.",
            error.missing,
        ) from error
