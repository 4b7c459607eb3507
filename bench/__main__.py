"""Restores the same checkpoints with Orbax's own handlers and with orbax_ext, on hosts with shaped links.

python -m bench [--only dense ...] [--strategies plain spread ...] [--quiet-only | --busy-only]

Results are merged into results.json after each strategy, so that several calls, or one that is cut off, add up. To
measure everything in calls of five minutes, repeat until it exits with another code than 3:

python -m bench --missing --within 300
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from bench import criteria, estimates, network, plots, results, running, tables
from bench.scenarios import Scenario, scenarios
from bench.strategies import BEFORE, OTHER_CODE, STOCK_OLDEST, STRATEGIES
from tools import releases

Todo = Mapping[Scenario, Sequence[running.Step]]


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    unshaped = network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
    settings = running.Settings(
        args.repeat, args.auto_runs, args.oldest, args.before, unshaped, running.commit_of(releases.ROOT)
    )
    args.out.mkdir(parents=True, exist_ok=True)
    earlier = results.load(args.out / "results.json").results
    todo = _todo(args, settings, earlier)
    _announce(todo, earlier)
    if args.estimate:
        return 0
    new = _measure(todo, settings, args.out / "results.json", time.monotonic() + args.within)
    _write(args.out)
    print(f"\n{tables.summary(new)}")
    left = sum(map(len, todo.values())) - len(new)
    if left:
        print(f"There was no time for {left} more, each a strategy in a scenario.")
    if not all(result.exact or result.failed for result in new if result.strategy not in OTHER_CODE):
        return 1
    return 3 if left else 0


def _todo(args: argparse.Namespace, settings: running.Settings, earlier: Sequence[results.Result]) -> Todo:
    """Returns what the arguments ask for, without scenarios of which nothing is to be run."""
    conditions = [False] * (not args.busy_only) + [True] * (not args.quiet_only)
    todo = {}
    for scenario in scenarios():
        if (args.only and scenario.name not in args.only) or (settings.unshaped and scenario.changes):
            continue
        steps = running.steps(scenario, conditions, args.strategies, settings)
        if args.missing:
            steps = [step for step in steps if not running.is_done(step, earlier, settings)]
        if steps:
            todo[scenario] = steps
    return todo


def _measure(todo: Todo, settings: running.Settings, file: pathlib.Path, end: float) -> list[results.Result]:
    """Runs everything that ends in time, and merges each result into the file. Returns the new ones."""
    measured, about = [*results.load(file).results], _about(settings.unshaped)
    new: list[results.Result] = []

    def begins(step: running.Step) -> bool:
        return time.monotonic() + _step_seconds(step, measured) < end

    for number, (scenario, steps) in enumerate(todo.items()):
        if time.monotonic() + estimates.saving(scenario) + _step_seconds(steps[0], measured) > end:
            continue
        left = estimates.in_words(_seconds(dict([*todo.items()][number:]), measured))
        print(f"[{number + 1} of {len(todo)}, about {left} left] {scenario.name}: {scenario.about}", flush=True)
        with contextlib.closing(running.run(scenario, steps, settings, begins)) as ran:
            for result in ran:
                print(f"  {'busy' if result.busy else 'quiet'} {result.strategy:14} {_in_words(result)}", flush=True)
                new.append(result)
                measured[:] = results.merged(measured, result)
                file.write_text(json.dumps(results.to_json(measured, about), indent=1))
    return new


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    names = [scenario.name for scenario in scenarios()]
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", choices=names, help=f"some of: {', '.join(names)}")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="some of them")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--quiet-only", action="store_true", help="only with the machine otherwise idle")
    when.add_argument("--busy-only", action="store_true", help="only while another program keeps all cores busy")
    parser.add_argument(
        "--repeat", type=int, help=f"how often each restore but auto and {STOCK_OLDEST!r} is run (the scenario's own)"
    )
    parser.add_argument("--auto-runs", type=int, default=5, help="how often auto is run (5)")
    parser.add_argument("--oldest", metavar="PYTHON", help=f"an environment with Orbax 0.11.33, for {STOCK_OLDEST!r}")
    parser.add_argument("--before", metavar="PATH", type=pathlib.Path, help=f"another checkout, for {BEFORE!r}")
    parser.add_argument("--missing", action="store_true", help="only what has no result at this commit yet")
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", default=math.inf, help="begin nothing that would end later than that"
    )
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bench"), help="where results go")
    return parser


def _announce(todo: Todo, measured: Sequence[results.Result]) -> None:
    for scenario, steps in todo.items():
        runs = sum(step.times for step in steps)
        print(f"{scenario.name:16} {runs:3} runs, about {estimates.in_words(_seconds({scenario: steps}, measured))}")
    print(f"All together: about {estimates.in_words(_seconds(todo, measured))}", flush=True)


def _seconds(todo: Todo, measured: Sequence[results.Result]) -> float:
    """Returns how long some steps are expected to take."""
    saving = sum(estimates.saving(scenario) for scenario, steps in todo.items() if steps)
    return saving + sum(_step_seconds(step, measured) for steps in todo.values() for step in steps)


def _step_seconds(step: running.Step, measured: Sequence[results.Result]) -> float:
    return estimates.seconds(step.scenario, step.strategy, step.times, step.busy, measured)


def _write(out: pathlib.Path) -> None:
    measured = results.load(out / "results.json")
    if not measured.results:
        return
    pages = {
        out / "speed.md": tables.page(measured.about).text(*tables.parts(measured.results)),
        out / "figures.md": criteria.PAGE.text(*criteria.parts(measured.results)),
    }
    for path, page in pages.items():
        path.write_text(page)
    try:
        drawn = plots.draw(measured.results, out)
    except ImportError:
        print("No plots: matplotlib is not installed (pip install 'orbax-ext[bench]').")
        drawn = []
    print("Wrote", *(str(path) for path in (out / "results.json", *pages, *drawn)))


def _in_words(result: results.Result) -> str:
    runs = ", ".join(f"{run.seconds:.2f} s{'' if run.exact else ' (not exact)'}" for run in result.runs)
    return result.failed or runs


def _about(unshaped: str) -> dict[str, str]:
    return {
        "shaped": unshaped or "yes",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        **{name: importlib.metadata.version(name) for name in results.PACKAGES},
    }


if __name__ == "__main__":
    sys.exit(main())
