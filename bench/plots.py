"""Pictures of what the benchmark found. Needs matplotlib (the `bench` extra)."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from bench.results import Result
from bench.scenarios import AUTO_TOLD

_COLOURS = {
    "plain": "#8c8c8c",
    "stock": "#d08770",
    "stock 0.11.33": "#e5b8a5",
    "single": "#7aa6c2",
    "spread": "#2e7d9a",
    "auto": "#1b4f72",
    AUTO_TOLD: "#0c2436",
}


def draw(results: Sequence[Result], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes each picture as PNG and SVG; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "orbax_ext"})
    from matplotlib import pyplot

    made = []
    for name, figure in (("seconds", _by_scenario(results)), ("hosts", _by_hosts(results))):
        if figure is None:
            continue
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            figure.savefig(path, bbox_inches="tight", dpi=130, metadata={"Date": None} if kind == "svg" else None)
            made.append(path)
        pyplot.close(figure)
    return made


def _by_scenario(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """Seconds of every peer, as multiples of what the links allow."""
    from matplotlib import pyplot

    shown = [found for found in results if not found.scenario.startswith("hosts_") and not found.failed]
    scenarios = list(dict.fromkeys(found.scenario for found in shown))
    if not scenarios:
        return None
    peers = [peer for peer in _COLOURS if any(found.peer == peer for found in shown)]
    figure, axes = pyplot.subplots(figsize=(11, 0.95 * len(scenarios) + 1.4))
    height = 0.82 / len(peers)
    for row, scenario in enumerate(scenarios):
        for found in (found for found in shown if found.scenario == scenario):
            at = row + (peers.index(found.peer) - (len(peers) - 1) / 2) * height
            axes.barh(at, found.seconds, height, color=_COLOURS[found.peer], edgecolor="none")
            note = f"{found.seconds:.1f} s" + ("" if found.exact else ", not exact")
            axes.annotate(note, (found.seconds, at), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
        limit = next(found.limit for found in shown if found.scenario == scenario)
        axes.plot([limit, limit], [row - 0.45, row + 0.45], color="black", linewidth=1.2)
    axes.set_yticks(range(len(scenarios)), scenarios)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=0.3 * min(found.limit for found in shown))
    axes.set_xlabel("seconds to restore (logarithmic); black lines: what the links allow")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[peer]) for peer in peers]
    axes.legend(
        handles, [_label(peer) for peer in peers], loc="upper center", bbox_to_anchor=(0.5, 1.06), ncol=4, frameon=False
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _by_hosts(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """Seconds against the number of hosts, with the work of each host the same."""
    from matplotlib import pyplot

    shown = [found for found in results if found.scenario.startswith("hosts_") and not found.failed]
    if not shown:
        return None
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for peer, colour in _COLOURS.items():
        points = sorted((int(found.scenario.removeprefix("hosts_")), found) for found in shown if found.peer == peer)
        if points:
            hosts, found = zip(*points, strict=True)
            axes.plot(hosts, [each.seconds for each in found], marker="o", color=colour, label=_label(peer))
    axes.set_xticks(sorted({int(found.scenario.removeprefix("hosts_")) for found in shown}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hosts (the same work for each)")
    axes.set_ylabel("seconds to restore")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label(peer: str) -> str:
    return peer if peer.startswith(("plain", "stock")) else f"ours: {peer}"
