"""Figures and tables as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """Bytes in powers of 1000, as storage and networks are sold: "17.3 kB"."""
    value = float(count)
    for unit in _UNITS[:-1]:
        if abs(value) < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {_UNITS[-1]}"


def seconds(value: float) -> str:
    if value < 0.001:
        return "< 1 ms"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 3600 else f"{value / 3600:.1f} h"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) if sizes else "()"


def count(number: int, thing: str) -> str:
    """A number of things: 1 leaf, 2 leaves, 3 steps."""
    if number == 1:
        return f"1 {thing}"
    plural = {"leaf": "leaves", "copy": "copies", "process": "processes", "mesh": "meshes"}.get(thing, f"{thing}s")
    return f"{number:,} {plural}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> str:
    """Columns of equal width; those numbered in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return (indent + "  ".join(cells)).rstrip()

    return "\n".join([line(head), indent + "  ".join("-" * width for width in widths), *map(line, rows)])
