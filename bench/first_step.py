"""Seconds from the start of a training program to the end of its first step: restore, compile, step.

python -m bench.first_step [--only dense dense_slow] [--repeat 1] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence

from bench import first_step_work, network, work
from bench.scenarios import Scenario, scenarios
from orbax_ext import lab
from tools import markdown

WAYS = ("plain", "register()", "restore_async", 'restore_async, exchange="background"')
SCENARIOS = ("dense", "dense_slow")
_LIMIT = 300.0  # seconds for one start
_TO_REACH = 1.15  # times the longer of the two alone, by `restore_async`
_PROBES = (8, 32)  # layers that are compiled to find out how long one takes

PAGE = markdown.Page(
    "bench/results/first_step.md",
    "Seconds to the end of the first step, measured",
    """Four hosts with two devices each, dp=4 x tp=2, restore a state, compile a step and run it. The step has as many
    unrolled layers as make compiling take as long as the restore by `register()`, each measured alone on the same
    hosts, as often as each way. "x limit" is relative to the longer of the two alone; then comes whether that is what
    `restore_async` is to reach, and the seconds of the parts. All hosts share this machine's two cores: "busy" says how
    busy they were.""",
    "make bench-first-step",
)
HEAD = (
    "scenario",
    "way",
    "seconds",
    "x limit",
    f"at most {_TO_REACH:g}x",
    "compiling",
    "restore or result()",
    "step",
    "busy",
    "same loss as plain",
)


class Bench:
    """One scenario's checkpoint and hosts."""

    def __init__(self, scenario: Scenario, root: pathlib.Path, shaped: bool) -> None:
        self._scenario = scenario
        self._root = root
        self._shaped = shaped
        self._path = str(root / "storage" / "checkpoint")
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT) as cluster:
            cluster.run(work.save, scenario, self._path)

    def run(self, way: str, layers: int) -> list[first_step_work.FirstStep]:
        """Starts the program once, on processes that have just begun."""
        scenario, storage = self._scenario, self._root / "storage"
        shaped = network.Network(scenario.hosts, scenario.links, storage) if self._shaped else contextlib.nullcontext()
        with shaped as net:
            where = {} if net is None else {"host": net.coordinator, "command_prefix": net.command_prefix}
            url = "" if net is None else net.url
            with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT, **where) as cluster:  # type: ignore[arg-type]
                return cluster.run(first_step_work.first_step, scenario, self._path, way, layers, url)

    def layers_for(self, seconds: float) -> int:
        """Returns how many layers take so long to compile on all hosts at once."""
        with lab.Cluster(self._scenario.hosts, self._scenario.devices, timeout=_LIMIT) as cluster:
            took = [max(cluster.run(first_step_work.compile_seconds, self._scenario, layers)) for layers in _PROBES]
        each = (took[1] - took[0]) / (_PROBES[1] - _PROBES[0])
        return max(1, round(_PROBES[0] + (seconds - took[0]) / each))


def _seconds(run: Sequence[first_step_work.FirstStep]) -> float:
    return max(one.ended for one in run) - min(one.started for one in run)


def _busy(run: Sequence[first_step_work.FirstStep]) -> float:
    return 1 - max(one.idle_seconds for one in run) / (_seconds(run) * (os.cpu_count() or 1))


def judged(way: str, times: float) -> str:
    """Returns whether a way meets what `restore_async` is to reach; "" for the ways that are there to compare."""
    if "restore_async" not in way:
        return ""
    return "met" if round(times, 2) <= _TO_REACH else "**not met**"


def measure(bench: Bench, name: str, repeat: int) -> tuple[list[list[str]], str]:
    """Returns the rows of a scenario, and a line about what each part takes alone."""
    restore = statistics.median(_seconds(bench.run("restore", 0)) for _ in range(repeat))
    layers = bench.layers_for(restore)
    compiling = statistics.median(_seconds(bench.run("compile", layers)) for _ in range(repeat))
    limit = max(restore, compiling)
    rows, loss = [], b""
    for way in WAYS:
        runs = [bench.run(way, layers) for _ in range(repeat)]
        seconds = statistics.median(map(_seconds, runs))
        loss = loss or runs[0][0].loss
        same = all(one.loss == loss for run in runs for one in run)
        parts = [
            statistics.median(max(getattr(one, part) for one in run) for run in runs)
            for part in ("compiled", "restored", "stepped")
        ]
        busy = f"{statistics.median(map(_busy, runs)):.0%}"
        figures = [f"{figure:.2f}" for figure in parts]
        row = [name, way, f"{seconds:.2f}", f"{seconds / limit:.2f}", judged(way, seconds / limit)]
        rows.append([*row, *figures, busy, "yes" if same else "**no**"])
        print(markdown.row(rows[-1]), flush=True)
    about = f"`{name}`: {layers} layers; alone, the restore takes {restore:.2f} s and compiling {compiling:.2f} s."
    return rows, about


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.first_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="some of the scenarios")
    parser.add_argument("--repeat", type=int, default=1, help="how often each start is run (1)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    unshaped = network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
    rows, abouts = [], []
    print(markdown.row(HEAD), flush=True)
    for scenario in (one for one in scenarios() if one.name in args.only):
        with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
            made, about = measure(Bench(scenario, pathlib.Path(folder), not unshaped), scenario.name, args.repeat)
        rows += made
        abouts.append(about)
        print(about, flush=True)
    if args.write:
        PAGE.write(markdown.table(HEAD, rows), "\n".join(f"- {about}" for about in abouts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
