"""Plots of the benchmark's results: python -m bench.plots. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from bench import results as results_lib
from bench.results import Result
from bench.strategies import BASELINES, STRATEGIES

_COLOURS = dict(zip(STRATEGIES, ("#8c8c8c", "#d08770", "#e5b8a5", "#7aa6c2", "#2e7d9a", "#1b4f72"), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=(__doc__ or "").split(":")[0])
    parser.add_argument("results", type=pathlib.Path, nargs="?", default=results_lib.RESULTS, help="a results.json")
    path = parser.parse_args(argv).results
    print("Wrote", *draw(results_lib.load(path).results, path.parent))
    return 0


def draw(results: Sequence[Result], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes each plot as PNG and SVG and returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "orbax_ext"})
    from matplotlib import pyplot

    files = []
    for name, figure in (("seconds", _by_scenario(results)), ("hosts", _by_hosts(results))):
        if figure is None:
            continue
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, bbox_inches="tight", dpi=130, metadata={"Date": None} if kind == "svg" else None)
            files.append(path)
        pyplot.close(figure)
    return files


def _by_scenario(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """Plots the seconds of every strategy, beside what the links allow."""
    from matplotlib import pyplot

    shown = [result for result in results if not result.scenario.startswith("hosts_") and not result.failed]
    scenarios = list(dict.fromkeys(result.scenario for result in shown))
    if not scenarios:
        return None
    strategies = [strategy for strategy in STRATEGIES if any(result.strategy == strategy for result in shown)]
    figure, axes = pyplot.subplots(figsize=(11, 0.95 * len(scenarios) + 1.4))
    height = 0.82 / len(strategies)
    for row, scenario in enumerate(scenarios):
        for result in (result for result in shown if result.scenario == scenario):
            at = row + (strategies.index(result.strategy) - (len(strategies) - 1) / 2) * height
            axes.barh(at, result.seconds, height, color=_COLOURS[result.strategy], edgecolor="none")
            note = f"{result.seconds:.1f} s" + ("" if result.exact else ", not exact")
            axes.annotate(note, (result.seconds, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
        limit = next(result.limit for result in shown if result.scenario == scenario)
        axes.plot([limit, limit], [row - 0.45, row + 0.45], color="black", linewidth=1.2)
    axes.set_yticks(range(len(scenarios)), scenarios)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=0.3 * min(result.limit for result in shown))
    axes.set_xlabel("seconds to restore (logarithmic); black lines: what the links allow")
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
        if result.scenario.startswith("hosts_") and not result.failed
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
