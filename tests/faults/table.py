"""The table of faults in BUILD.md: what each does to stock Orbax and to orbax_ext, as measured."""

from __future__ import annotations

import dataclasses
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
    """Puts the rows between the markers of a release, where the document has them; other rows there are kept."""
    begin, end = f"<!-- faults {release}:begin -->", f"<!-- faults {release}:end -->"
    text = document.read_text()
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)

    def merged(match: re.Match[str]) -> str:
        known = {row.fault: row for row in (*_rows(match.group()), *rows)}
        return f"{begin}\n{markdown(list(known.values()))}\n{end}"

    document.write_text(pattern.sub(merged, text))


def _rows(text: str) -> list[Row]:
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [Row(*each) for each in cells if len(each) == 3 and each[0] != "fault"]
