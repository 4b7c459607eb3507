"""A report in words."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orbax_ext.text import size

if TYPE_CHECKING:
    from orbax_ext.report.report import ProcessReport, RestoreReport

_MOST_ROWS = 16  # processes that a table shows one by one
_PHASES = ("read", "exchange", "wait", "compile", "connect", "verify")


def headline(report: RestoreReport) -> str:
    """One line: what came of it, how much, how long."""
    own, members = report.own, report.members.values()
    ways = Counter(how.partition(":")[0] for how in report.strategy.values())
    spread = ", ".join(f"{count} {way}" for way, count in ways.items()) or "nothing planned"
    whose = f"process {own.process} of {report.processes}" if len(report.members) == 1 else f"{len(members)} processes"
    read = sum(member.bytes_read for member in members)
    text = f"{whose}: {report.leaves} leaves ({spread}) in {report.groups} groups, {size(read)} read from storage in "
    text += f"{max(member.total_seconds for member in members):.2f} s"
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in own.seconds.items())
    return f"{'failed' if report.error else 'restored'}: {text}; {phases}{_s3(report)}"


def table(report: RestoreReport) -> str:
    """The headline and a row for each process, or the least, the median and the most where they are many."""
    members = [report.members[process] for process in sorted(report.members)]
    titles = columns(members)
    rows = [["process", *titles]]
    if len(members) <= _MOST_ROWS:
        rows += [[str(m.process), *(shown(value, m) for value in titles.values())] for m in members]
    else:
        rows += [[name, *(_picked(pick, value, members) for value in titles.values())] for name, pick in _PICKS.items()]
    lines = [headline(report), *_aligned(rows)]
    if report.missing:
        lines.append(f"no word from {len(report.missing)} processes: {', '.join(map(str, report.missing[:16]))}")
    if report.error:
        lines.append(f"error: {report.error.strip().splitlines()[0]}")
    return "\n".join(lines)


Value = Callable[["ProcessReport"], float | str]


def columns(members: Sequence[ProcessReport]) -> dict[str, Value]:
    """What there is to tell, by title: numbers of seconds, numbers of bytes, or words."""
    phases = [phase for phase in _PHASES if any(phase in member.seconds for member in members)]
    columns: dict[str, Value] = {f"{phase} s": _seconds(phase) for phase in phases}
    columns["total s"] = lambda m: m.total_seconds
    columns["bytes read"] = lambda m: size(m.bytes_read)
    columns["requests"] = lambda m: str(m.requests)
    columns["received"] = lambda m: size(m.bytes_received)
    columns["sent"] = lambda m: size(m.bytes_sent)
    columns["peak memory"] = lambda m: size(m.host_peak_bytes)
    columns["waited most for"] = _waited_for
    return columns


def _seconds(phase: str) -> Value:
    return lambda member: member.seconds.get(phase, 0.0)


def _waited_for(member: ProcessReport) -> str:
    if not member.waits:
        return "-"
    process, seconds = next(iter(member.waits.items()))
    return f"{process} ({seconds:.2f} s)"


def _s3(report: RestoreReport) -> str:
    if not any(report.s3.values()):
        return ""
    s3 = report.s3
    return (
        f"; S3: {s3['metadata_requests'] + s3['array_requests']} requests, "
        f"{s3['metadata_bytes'] + s3['array_bytes']} bytes"
    )


def shown(value: Value, member: ProcessReport) -> str:
    found = value(member)
    return found if isinstance(found, str) else f"{found:.2f}"


_PICKS: dict[str, Callable[[Sequence[float]], float]] = {"least": min, "median": statistics.median, "most": max}


def _picked(pick: Callable[[Sequence[float]], float], value: Value, members: Sequence[ProcessReport]) -> str:
    found = [value(member) for member in members]
    numbers = [each for each in found if not isinstance(each, str)]
    return f"{pick(numbers):.2f}" if len(numbers) == len(found) else ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
