"""What the demo shows: rows of a table, made from the outcomes of processes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_ext import lab
from orbax_ext import text as text_lib

NAMES = {"plain": "plain Orbax", "stock": "Orbax, single replica", "ours": "orbax_ext"}
_HEADER = ("act", "", "outcome", "time", "read", "exact")
_MOST_REASON = {NAMES["ours"]: 280}  # characters of an error message: ours has the leaf and the file at its end


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to restore, and what came of it on all processes together."""

    way: str
    outcome: str
    seconds: float | None = None
    megabytes_read: float | None = None
    exact: bool | None = None  # None: nothing was restored
    meeting: float | None = None  # seconds that a process was in the first meeting, at most; None if there was none
    taken_over: tuple[int, ...] = ()  # processes whose part others have read

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.way,
            self.outcome,
            "-" if self.seconds is None else text_lib.seconds(self.seconds),
            "-" if self.megabytes_read is None else text_lib.size(self.megabytes_read * 1e6),
            {True: "yes", False: "no", None: "-"}[self.exact],
        )


@dataclasses.dataclass(frozen=True)
class Act:
    """One act of the demo: its rows, what orbax_ext claims in it, and what is missing of that."""

    letter: str
    title: str
    claim: str
    rows: tuple[Row, ...]
    broken: tuple[str, ...] = ()  # parts of the claim that were not kept
    page: str | None = None  # the timeline of the restore, as HTML

    @property
    def kept(self) -> bool:
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {
            "act": self.letter,
            "title": self.title,
            "claim": self.claim,
            "kept": self.kept,
            "broken": list(self.broken),
            "rows": rows,
        }


def row_of(way: str, outcomes: Sequence[lab.Outcome], grace: float = 0.0) -> Row:
    """Returns the row of one restore: the slowest process's seconds, and the bytes that all processes read.

    `grace` is how long the processes that still ran were left alone once one had failed.
    """
    if not all(outcome.ok for outcome in outcomes):
        return Row(way, _failure(outcomes, grace, _MOST_REASON.get(way, 70)))
    values = [outcome.value for outcome in outcomes]
    changed = {leaf: change for value in values for leaf, change in value["changed"].items()}
    read = sum(value.get("bytes_read", 0) for value in values)
    waiting = max(value.get("waiting") or 0.0 for value in values)
    meetings = [value["meeting"] for value in values if value.get("meeting") is not None]
    taken_over = sorted({process for value in values for process in value.get("taken_over", ())})
    restored = "restored" + (f"; up to {text_lib.seconds(waiting)} to meet, connect, compile" if waiting else "")
    restored += f"; others read the part of {text_lib.processes(taken_over, {})}" if taken_over else ""
    return Row(
        way,
        f"changed {_changes(changed)}" if changed else restored,
        round(max(value["seconds"] for value in values), 2),
        round(read / 1e6, 1) if read else None,
        not changed,
        round(max(meetings), 3) if meetings else None,
        tuple(taken_over),
    )


def _changes(changed: Mapping[str, str]) -> str:
    return ", ".join(f"{leaf} ({how})" for leaf, how in sorted(changed.items()))


def _failure(outcomes: Sequence[lab.Outcome], grace: float, most: int) -> str:
    raised = [outcome for outcome in outcomes if outcome.failure is not None]
    hanging = sum(outcome.state == "timed out" for outcome in outcomes)
    died = sum(outcome.state == "died" for outcome in outcomes)
    parts = []
    if raised:
        parts.append(f"{_of(len(raised), outcomes)} failed: {short(str(raised[0].failure), most)}")
    if hanging:
        parts.append(f"{_of(hanging, outcomes)} hung (ended after {grace:.0f} s)")
    if died:
        parts.append(f"{_of(died, outcomes)} died")
    return "; ".join(parts)


def _of(number: int, outcomes: Sequence[lab.Outcome]) -> str:
    return f"{number} of {text_lib.count(len(outcomes), 'process')}"


def short(text: str, most: int) -> str:
    """Returns the beginning of an error message, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def table(acts: Sequence[Act]) -> str:
    """Returns one table of all acts; long outcomes are cut at a comma or at a blank."""
    body = []
    for act in acts:
        for number, row in enumerate(act.rows):
            way, outcome, *figures = row.cells
            first, *more = _wrapped(outcome)
            body.append((act.letter if number == 0 else "", way, first, *figures))
            body.extend(("", "", line, "", "", "") for line in more)
    legend = "time: of the slowest process; read: from storage, compressed, all processes together; exact: bit for bit"
    return text_lib.table(_HEADER, body, right=(3, 4), indent="") + f"\n\n{legend}"


def _wrapped(text: str, width: int = 48) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
