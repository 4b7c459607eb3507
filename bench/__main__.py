"""Restores the same checkpoints with Orbax's own handlers and with orbax_ext, on hosts with shaped links.

python -m bench [--only dense ...] [--strategies plain spread ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from bench import network, plots, results, work
from bench.scenarios import Scenario, scenarios
from bench.strategies import BASELINES, STOCK_OLDEST, STRATEGIES
from orbax_ext import lab

_LIMIT = 600.0  # seconds for one restore
_LONG = 75.0  # seconds after which a restore is not run again


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", help="some of the scenarios")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="some of them")
    parser.add_argument(
        "--repeat", type=int, help=f"how often each restore but {STOCK_OLDEST!r} is run, instead of the scenario's own"
    )
    parser.add_argument("--oldest", metavar="PYTHON", help=f"an environment with Orbax 0.11.33, for {STOCK_OLDEST!r}")
    parser.add_argument("--keep", action="store_true", help="keep earlier results of scenarios that are not run now")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bench"), help="where results go")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    chosen = [scenario for scenario in scenarios() if not args.only or scenario.name in args.only]
    strategies = [strategy for strategy in args.strategies if strategy != STOCK_OLDEST or args.oldest]
    unshaped = network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
    args.out.mkdir(parents=True, exist_ok=True)
    measured = _earlier(args.out / "results.json", chosen) if args.keep else []
    about = _about(unshaped)
    for number, scenario in enumerate(chosen):
        print(f"[{number + 1} of {len(chosen)}] {scenario.name}: {scenario.about}", flush=True)
        new = run(scenario, strategies, args.repeat or scenario.repeat, args.oldest, unshaped)
        measured += new
        print(f"\n{results.table(scenario, new)}\n", flush=True)
        (args.out / "results.json").write_text(json.dumps(results.to_json(measured, about), indent=1))
    _write(measured, about, args.out)
    ours = [result for result in measured if result.strategy not in BASELINES]
    return 0 if all(result.exact for result in ours if not result.failed) else 1


def _earlier(path: pathlib.Path, chosen: list[Scenario]) -> list[results.Result]:
    """Returns the results in a file, without those of scenarios that are run again."""
    again = {scenario.name for scenario in chosen}
    return [result for result in results.load(path).results if result.scenario not in again]


def _write(measured: Sequence[results.Result], about: Mapping[str, str], out: pathlib.Path) -> None:
    page = results.page(about).text(*results.parts(measured))
    (out / "speed.md").write_text(page)
    order = [scenario.name for scenario in scenarios()]
    try:
        drawn = plots.draw(sorted(measured, key=lambda result: order.index(result.scenario)), out)
    except ImportError:
        print("No plots: matplotlib is not installed (pip install 'orbax-ext[bench]').")
        drawn = []
    print("Wrote", *(str(path) for path in (out / "results.json", out / "speed.md", *drawn)))


def run(
    scenario: Scenario, strategies: list[str], repeat: int, oldest: str | None, unshaped: str
) -> list[results.Result]:
    """Restores a scenario with each strategy; `unshaped` is the reason why links can't be shaped, if there is one."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
        root = pathlib.Path(folder)
        path = str(root / "checkpoint")
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT) as cluster:
            cluster.run(work.save, scenario, path)
        with contextlib.nullcontext() if unshaped else network.Network(scenario.hosts, scenario.links, root) as net:
            measured = []
            for strategy in strategies:
                runs: list[results.Run] = []
                times = 1 if strategy == STOCK_OLDEST else repeat  # once is enough to compare it with the newest
                while len(runs) < times and sum(run.seconds for run in runs) < _LONG:
                    # New processes each time, so that no restore profits from what an earlier one left in memory.
                    with _hosts(scenario, net, oldest if strategy == STOCK_OLDEST else None) as cluster:
                        runs.append(_measure(scenario, path, strategy, cluster, net))
                    if runs[-1].error:
                        break
                measured.append(results.result(scenario, strategy, runs))
                print(f"  {strategy:17} {_in_words(runs)}", flush=True)
            return measured


@contextlib.contextmanager
def _hosts(scenario: Scenario, net: network.Network | None, python: str | None) -> Iterator[lab.Cluster]:
    where = {} if net is None else {"host": net.coordinator, "command_prefix": net.command_prefix}
    environment = {"PYTHONWARNINGS": "ignore"}
    with lab.Cluster(
        scenario.hosts,
        scenario.devices,
        timeout=_LIMIT,
        env=environment,
        python=python or sys.executable,
        **where,  # type: ignore[arg-type]
    ) as cluster:
        yield cluster


def _measure(
    scenario: Scenario, path: str, strategy: str, cluster: lab.Cluster, net: network.Network | None
) -> results.Run:
    before = net.bytes_served() if net else [0]
    outcomes = cluster.outcomes(work.restore, scenario, path, strategy, net.url if net else "")
    served = sum(net.bytes_served()) - sum(before) if net else 0
    bad = next((outcome for outcome in outcomes if not outcome.ok), None)
    if bad is not None:
        return results.Run(0.0, False, 0, 0, 0, 0.0, 0.0, error=str(bad).splitlines()[0][:200])
    restores: list[work.Restore] = [outcome.value for outcome in outcomes]
    seconds = max(restore.ended for restore in restores) - min(restore.started for restore in restores)
    from_storage = served // scenario.hosts if scenario.links.shared else 0  # counted on the fabric's link too
    return results.Run(
        seconds,
        all(restore.exact for restore in restores),
        served,
        max(restore.fabric_received for restore in restores) - from_storage,
        max(restore.peak for restore in restores),
        max(restore.compile_seconds for restore in restores),
        1 - max(restore.idle_seconds for restore in restores) / (os.cpu_count() or 1) / seconds,
        report=restores[0].report,
    )


def _in_words(runs: list[results.Run]) -> str:
    failed = next((run.error for run in runs if run.error), "")
    return failed or ", ".join(f"{run.seconds:.2f} s{'' if run.exact else ' (not exact)'}" for run in runs)


def _about(unshaped: str) -> dict[str, str]:
    return {
        "shaped": unshaped or "yes",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        **{name: importlib.metadata.version(name) for name in results.PACKAGES},
    }


if __name__ == "__main__":
    sys.exit(main())
