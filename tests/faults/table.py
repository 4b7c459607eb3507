"""The table of faults: what each fault does to stock Orbax and to orbax_ext, as measured."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence

from orbax_ext import lab
from tools import markdown

PAGE = markdown.Page(
    "bench/results/faults.md",
    "Faults during a restore, measured",
    """Each fault happens to stock Orbax's single-replica handler and to orbax_ext, on 4 processes x 2 devices each
    (`tests/faults`). The reader is process 1 and `stall_timeout` is 6 s. Every surviving process of orbax_ext must
    end within that time plus 10 s (plus what a healthy restore, and the fault by design, take), with the culprit in
    the message; where all processes live, the next restore must work. "Hang" means no end within 15 s, or within
    four times what a healthy restore takes on the machine. "Before" is what orbax_ext did until other replicas took
    over what a reader can't read.""",
    "make faults-table",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    stock: str
    ours: str
    before: str = ""  # what ours was before take-overs, if that differs


def summary(outcomes: Sequence[lab.Outcome]) -> str:
    """Returns the outcomes of a restore on all processes in one line: `3 hang, 1 OSError`."""
    counts = Counter(
        outcome.value.outcome if outcome.ok else {"timed out": "hang", "died": "dead"}.get(outcome.state, outcome.state)
        for outcome in outcomes
    )
    if len(counts) == 1:
        return f"all {next(iter(counts))}"
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def table(rows: Sequence[Row]) -> str:
    lines = [(row.fault, row.stock, row.before or row.ours, row.ours) for row in rows]
    return markdown.table(("fault", "stock Orbax", "before", "orbax_ext"), lines)


def parts(by_release: Mapping[str, Sequence[Row]]) -> tuple[str, ...]:
    """Returns the page's parts: a table for each Orbax release."""
    return tuple(f"## Orbax {release}\n\n{table(rows)}" for release, rows in by_release.items())


def load() -> dict[str, list[Row]]:
    """Returns the rows of each release that were measured so far."""
    by_release = json.loads(_data().read_text()) if _data().exists() else {}
    return {release: [Row(*row) for row in rows] for release, rows in by_release.items()}


def write(rows: Sequence[Row], release: str) -> None:
    """Writes the data and the page with new rows for a release; its other rows, and other releases, are kept."""
    by_release = load()
    merged = {row.fault: row for row in (*by_release.get(release, ()), *rows)}
    by_release[release] = list(merged.values())
    as_lists = {name: [dataclasses.astuple(row) for row in rows] for name, rows in by_release.items()}
    PAGE.write(*parts(by_release))
    _data().write_text(json.dumps(as_lists, indent=1) + "\n")


def _data() -> pathlib.Path:
    return PAGE.file.with_suffix(".json")
