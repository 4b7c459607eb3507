"""The table of faults in BUILD.md: what each does to stock Orbax and to orbax_ext, as measured."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Sequence

from orbax_ext import lab

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    stock: str
    ours: str


def summary(outcomes: Sequence[lab.Outcome]) -> str:
    """What came of a restore on all processes, in one line: `3 hang, 1 OSError`."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.ok:
            text = outcome.value.outcome
        else:
            text = {"timed out": "hang", "died": "dead"}.get(outcome.state, outcome.state)
        found[text] = found.get(text, 0) + 1
    if len(found) == 1:
        return f"all {next(iter(found))}"
    return ", ".join(f"{count} {text}" for text, count in sorted(found.items(), key=lambda item: -item[1]))


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| fault | stock Orbax | orbax_ext |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.fault} | {row.stock} | {row.ours} |" for row in rows)])


def write(rows: Sequence[Row], release: str, document: pathlib.Path = ROOT / "BUILD.md") -> None:
    """Puts the table of a release between its markers, where the document has them."""
    begin, end = f"<!-- faults {release}:begin -->", f"<!-- faults {release}:end -->"
    text = document.read_text()
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    document.write_text(pattern.sub(lambda match: f"{begin}\n{markdown(rows)}\n{end}", text))


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
