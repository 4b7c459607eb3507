"""Plots of the benchmark's results: python -m bench.plots. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from bench import readme_plot
from bench import results as results_lib
from bench.results import Result
from bench.scenarios import scenarios
from bench.strategies import AUTO, BASELINES, PLAIN, SINGLE, SPREAD, STOCK, STOCK_OLDEST

_COLOURS = {
    PLAIN: "#8c8c8c",
    STOCK: "#d08770",
    STOCK_OLDEST: "#e5b8a5",
    SINGLE: "#7aa6c2",
    SPREAD: "#2e7d9a",
    AUTO: "#1b4f72",
}
# Scenarios that each show something else; the page has them all.
_SHOWN = (
    *("dense", "fast_storage", "shared_link", "capped_storage", "balanced", "turning_slow", "turning_fast"),
    *("small_leaves", "huge_leaf", "fsdp_dp", "far_storage", "demo_state", "page_cache"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=(__doc__ or "").split(":")[0])
    parser.add_argument("results", type=pathlib.Path, nargs="?", default=results_lib.RESULTS, help="a results.json")
    path = parser.parse_args(argv).results
    print("Wrote", *draw(results_lib.load(path).results, path.parent))
    return 0


def draw(results: Sequence[Result], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes each plot as PNG and SVG, and those of README; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "orbax_ext"})
    from matplotlib import pyplot

    order = [scenario.name for scenario in scenarios()]
    quiet = [result for result in results if not result.busy and not result.failed and result.strategy in _COLOURS]
    quiet.sort(key=lambda result: order.index(result.scenario))
    files = []
    for name, figure in (("seconds", _by_scenario(quiet)), ("hosts", _by_hosts(quiet))):
        if figure is None:
            continue
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, bbox_inches="tight", dpi=130, metadata={"Date": None} if kind == "svg" else None)
            files.append(path)
        pyplot.close(figure)
    return files + readme_plot.draw(results, folder)


def _by_scenario(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """Plots the seconds of every strategy, beside what the links allow."""
    from matplotlib import pyplot

    shown = [result for result in results if result.scenario in _SHOWN]
    names = list(dict.fromkeys(result.scenario for result in shown))
    if not names:
        return None
    strategies = [strategy for strategy in _COLOURS if any(result.strategy == strategy for result in shown)]
    figure, axes = pyplot.subplots(figsize=(11, 0.95 * len(names) + 1.4))
    height = 0.82 / len(strategies)
    for row, name in enumerate(names):
        for result in (result for result in shown if result.scenario == name):
            at = row + (strategies.index(result.strategy) - (len(strategies) - 1) / 2) * height
            axes.barh(at, result.seconds, height, color=_COLOURS[result.strategy], edgecolor="none")
            note = f"{result.seconds:.1f} s" + ("" if result.exact else ", not exact")
            axes.plot([result.seconds, result.worst], [at, at], color="black", linewidth=0.8)  # up to the worst run
            axes.annotate(note, (result.worst, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
        limit = next(result.limit for result in shown if result.scenario == name)
        if limit:
            axes.plot([limit, limit], [row - 0.45, row + 0.45], color="black", linewidth=1.2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=0.3 * min(result.limit or result.seconds for result in shown))
    axes.set_xlabel("seconds to restore (logarithmic); thin: up to the worst run; upright: what the links allow")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[strategy]) for strategy in strategies]
    labels = [_label(strategy) for strategy in strategies]
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 1.06), ncol=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _by_hosts(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """Plots seconds against the number of hosts, with the same work for each host."""
    from matplotlib import pyplot

    shown = {
        (result.strategy, int(result.scenario.removeprefix("hosts_"))): result.seconds
        for result in results
        if result.scenario.startswith("hosts_")
    }
    if not shown:
        return None
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for strategy, colour in _COLOURS.items():
        points = sorted((hosts, seconds) for (other, hosts), seconds in shown.items() if other == strategy)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=_label(strategy))
    axes.set_xticks(sorted({hosts for _, hosts in shown}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hosts (the same work for each)")
    axes.set_ylabel("seconds to restore")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label(strategy: str) -> str:
    return strategy if strategy in BASELINES else f"ours: {strategy}"


if __name__ == "__main__":
    sys.exit(main())
