"""Writes the pages and plots that are made from data, without measuring: the table of defects and bench/results.

python -m tools.docs [--check]
"""

from __future__ import annotations

import argparse
import sys

from bench import cost_model, criteria, emergency_results, plots, predictions, results, tables
from orbax_ext.upstream import defects
from tests.faults import table as faults
from tools import markdown, releases

DEFECTS = markdown.Page(
    "docs/defects.md",
    "Defects of Orbax's single-replica restore",
    """What goes wrong with the `SingleReplicaArrayHandler` of each Orbax release, and what fixes it. `orbax-ext doctor`
    says which of these defects an installation has.""",
    "make docs",
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="only say which pages are out of date; plots are not compared"
    )
    check = parser.parse_args(argv).check
    everything = pages()
    stale = [(page, parts) for page, parts in everything if is_stale(page, *parts)]
    if check and stale:
        print("Out of date, run `make docs`:", *(page.path for page, _ in stale))
        return 1
    for page, parts in stale:
        page.write(*parts)
    if not check:
        _draw()
    print(f"{len(everything)} pages are up to date")
    return 0


def _draw() -> None:
    """Draws the plots anew."""
    folder = releases.ROOT / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        plots.draw(results.load().results, folder)
    except ImportError:
        print("Plots are as they were: matplotlib is not installed (pip install -e '.[bench]').")


def pages() -> list[tuple[markdown.Page, tuple[str, ...]]]:
    """Returns each page with its parts."""
    measured, emergency = results.load(), emergency_results.load()
    return [
        (DEFECTS, (defects.markdown_table(),)),
        (tables.page(measured.about), tables.parts(measured.results)),
        (criteria.PAGE, criteria.parts(measured.results)),
        (predictions.PAGE, (predictions.table(measured.results),)),
        (cost_model.PAGE, (cost_model.table(),)),
        (faults.PAGE, faults.parts(faults.load())),
        *([(emergency_results.PAGE, tuple(emergency_results.parts(emergency)))] if emergency else []),
    ]


def is_stale(page: markdown.Page, *parts: str) -> bool:
    """Returns whether the file on disk differs from what the data gives."""
    return not page.file.exists() or page.file.read_text() != page.text(*parts)


if __name__ == "__main__":
    sys.exit(main())
