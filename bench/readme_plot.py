"""The plot in README: seconds of plain Orbax, stock Orbax and orbax_ext by scenario, for light and for dark pages."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bench.results import Result
from bench.strategies import AUTO, PLAIN, STOCK

# Scenarios that each show something else, and what that is, in words for those who do not know them.
SHOWN = {
    "dense": "1 GiB, storage slower\nthan the network",
    "capped_storage": "storage with\na total cap",
    "balanced": "storage as fast\nas the network",
    "fast_storage": "storage faster\nthan the network",
    "shared_link": "one link\nfor both",
    "far_storage": "storage far away,\nsmall chunks",
    "fsdp_dp": "FSDP over two hosts,\ntwo replicas",
    "small_leaves": "5,000 leaves\nof 8 KiB",
}
LABELS = {PLAIN: "plain Orbax", STOCK: "Orbax, single replica", AUTO: "orbax_ext"}
MOST = 30.0  # seconds; a longer bar is cut off there, so that one second can still be seen
_WIDTH = 8.0  # inches: as wide as a README is shown, so that the text has its size
_FONT = 9.5  # points


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    page: str
    text: str
    grid: str
    bars: Mapping[str, str]  # by strategy


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#d8dee4", {PLAIN: "#8c959f", STOCK: "#d9825f", AUTO: "#0b5fa5"}),
    "dark": Theme("#0d1117", "#e6edf3", "#30363d", {PLAIN: "#7d8590", STOCK: "#d9825f", AUTO: "#58a6ff"}),
}


def shown(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Returns the results of each scenario that the plot shows, in the order of its rows and bars."""
    known = {(one.scenario, one.strategy): one for one in results if not one.busy and not one.failed}
    rows = {name: [known[name, strategy] for strategy in LABELS if (name, strategy) in known] for name in SHOWN}
    return {name: row for name, row in rows.items() if any(one.strategy == AUTO for one in row)}


def note(result: Result) -> str:
    """Returns what is written beside a bar."""
    return f"{result.seconds:.1f} s" + ("" if result.exact else ", not exact")


def draw(results: Sequence[Result], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes readme-light.svg and readme-dark.svg and returns the files; nothing if there is nothing to show."""
    from matplotlib import pyplot

    rows = shown(results)
    files = []
    for name, theme in THEMES.items() if rows else ():
        with pyplot.rc_context({"font.size": _FONT, "text.color": theme.text, "axes.edgecolor": theme.grid}):
            figure = _figure(rows, theme)
            figure.get_layout_engine().set(w_pad=0.08)  # other fonts than those it is drawn with can be wider
            files.append(folder / f"readme-{name}.svg")
            figure.savefig(files[-1], facecolor=theme.page, metadata={"Date": None})
            pyplot.close(figure)
    return files


def _figure(rows: Mapping[str, Sequence[Result]], theme: Theme) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(_WIDTH, 0.62 * len(rows) + 0.9), layout="constrained")
    axes.set_facecolor(theme.page)
    height = 0.8 / len(LABELS)
    for row, name in enumerate(rows):
        for result in rows[name]:
            at = row + (list(LABELS).index(result.strategy) - 1) * height
            length = min(result.seconds, MOST)
            axes.barh(at, length, 0.92 * height, color=theme.bars[result.strategy], edgecolor="none")
            if result.seconds > MOST:  # a gap before the end says that the bar goes on
                axes.barh(at, 0.2, height, left=MOST - 0.8, color=theme.page, edgecolor="none")
            bold = "bold" if result.strategy == AUTO else "normal"
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "weight": bold}
            axes.annotate(note(result), (length, at), annotation_clip=False, **place)
        limit = rows[name][0].limit
        if limit:
            axes.plot([limit, limit], [row - 0.44, row + 0.44], color=theme.text, linewidth=1.6)
    axes.set_yticks(range(len(rows)), [SHOWN[name] for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, MOST)
    axes.set_xlabel(f"seconds to restore; bars longer than {MOST:.0f} s are cut off", color=theme.text)
    axes.tick_params(colors=theme.text, length=0)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    figure.legend(*_legend(theme), loc="outside upper center", ncols=len(LABELS) + 1, frameon=False)
    return figure


def _legend(theme: Theme) -> tuple[list[Any], list[str]]:
    from matplotlib import lines, patches

    handles: list[Any] = [patches.Patch(color=theme.bars[strategy]) for strategy in LABELS]
    limit = lines.Line2D([], [], color=theme.text, linewidth=1.6, linestyle="none", marker="|", markersize=12)
    return [*handles, limit], [*LABELS.values(), "what the links allow"]
