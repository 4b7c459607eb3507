"""Markdown pages that a program writes as whole files, and their tables."""

from __future__ import annotations

import dataclasses
import pathlib
import textwrap
from collections.abc import Iterable, Sequence

from tools import releases


@dataclasses.dataclass(frozen=True)
class Page:
    """A generated file: what it shows and the command that writes it."""

    path: str  # below the root of the repository
    title: str
    about: str  # one paragraph
    command: str

    @property
    def file(self) -> pathlib.Path:
        return releases.ROOT / self.path

    def text(self, *parts: str) -> str:
        """Returns the whole file: the title, what it is, who writes it, and the parts."""
        about = textwrap.fill(" ".join(self.about.split()), 120, break_long_words=False, break_on_hyphens=False)
        return "\n\n".join([f"# {self.title}", about, f"Written by `{self.command}`; do not edit.", *parts]) + "\n"

    def write(self, *parts: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.text(*parts))
        print(f"Wrote {self.path}")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    return "\n".join([row(head), "|---" * len(head) + "|", *map(row, rows)])


def tables_in(text: str) -> list[list[list[str]]]:
    """Returns the cells of each table in a page, row by row, the head first and without the rule below it."""
    tables: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("|"):
            if not inside:
                tables.append([])
            tables[-1].append([cell.strip() for cell in line[1:-1].split("|")])
        inside = line.startswith("|")
    return [[head, *body] for head, _, *body in tables]


def row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
