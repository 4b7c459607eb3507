"""Sizes, durations, counts, lists, process names and tables as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import humanize

_PLURALS = {"leaf": "leaves", "copy": "copies", "process": "processes", "mesh": "meshes"}


def size(count: float) -> str:
    """Returns bytes in powers of 1000, as storage and networks are sold: "17.3 kB"."""
    return str(humanize.naturalsize(count, format="%.1f")).replace("Bytes", "B").replace("Byte", "B")


def seconds(value: float) -> str:
    """Returns a duration: "12 ms", "3.4 s", "2 minutes and 5 seconds"."""
    if value < 0.001:
        return "< 1 ms"
    if round(value, 3) < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return str(humanize.precisedelta(value, minimum_unit="seconds", format="%.0f"))


def share(part: float, whole: float) -> str:
    """Returns a part of a whole: "25%", or "-" if the whole is nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def shape(sizes: Sequence[int]) -> str:
    """Returns the shape of an array: "8x16", or "()" for a scalar."""
    return "x".join(map(str, sizes)) if sizes else "()"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 leaf", "2,000 leaves"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {_PLURALS.get(noun, noun + 's')}"


def listing(names: Iterable[object], most: int = 3) -> str:
    """Returns the first `most` names: "a, b, c and 4 more"."""
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:most])
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most:,} more"


def process(number: int, hosts: Mapping[int, str]) -> str:
    """Returns "process 3 (host)", or "process 3" if its host is not known."""
    return f"process {_with_host(number, hosts)}"


def processes(numbers: Iterable[int], hosts: Mapping[int, str], most: int = 8) -> str:
    """Returns "process 3 (host)" or "processes 3 (host), 5 (host) and 7 more"."""
    listed = list(numbers)
    noun = "process" if len(listed) == 1 else "processes"
    return f"{noun} {listing((_with_host(number, hosts) for number in listed), most)}"


def mesh(axes: Mapping[str, int]) -> str:
    """Returns a mesh as "(dp=4, tp=8)"."""
    return "(" + ", ".join(f"{name}={size}" for name, size in axes.items()) + ")"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> str:
    """Returns a table with aligned columns; the columns whose numbers are in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return (indent + "  ".join(cells)).rstrip()

    return "\n".join([line(head), indent + "  ".join("-" * width for width in widths), *map(line, rows)])


def _with_host(number: int, hosts: Mapping[int, str]) -> str:
    return f"{number} ({hosts[number]})" if number in hosts else str(number)
