"""Runs the benchmark: python -m orbax_ext.lab.bench [--only dense ...] [--peers plain spread ...]."""

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
from collections.abc import Iterator

from bench import plots, results, work
from bench.scenarios import AUTO_TOLD, Scenario, scenarios
from orbax_ext import lab
from orbax_ext.lab import network

_LIMIT = 600.0  # seconds for one restore
_LONG = 75.0  # seconds after which a restore is not run again
_OLDEST = "stock 0.11.33"
_WAYS = ("plain", "stock", _OLDEST, "single", "spread", "auto", AUTO_TOLD)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orbax_ext.lab.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", help="some of the scenarios")
    parser.add_argument("--peers", nargs="+", choices=_WAYS, default=_WAYS, help="some of the ways to restore")
    parser.add_argument(
        "--repeat", type=int, help=f"times that each restore but {_OLDEST!r} is run, instead of the scenario's own"
    )
    parser.add_argument("--oldest", metavar="PYTHON", help=f"an environment with Orbax 0.11.33, for {_OLDEST!r}")
    parser.add_argument("--keep", action="store_true", help="keep what is there of the scenarios that are not run now")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bench"), help="where results go")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    chosen = [each for each in scenarios() if not args.only or each.name in args.only]
    peers = [peer for peer in args.peers if peer != _OLDEST or args.oldest]
    unshaped = network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
    args.out.mkdir(parents=True, exist_ok=True)
    found = _earlier(args.out / "results.json", chosen) if args.keep else []
    for number, scenario in enumerate(chosen):
        print(f"[{number + 1} of {len(chosen)}] {scenario.name}: {scenario.about}", flush=True)
        new = run(scenario, peers, args.repeat or scenario.repeat, args.oldest, unshaped)
        found += new
        print(f"\n{results.table(scenario, new)}\n", flush=True)
        (args.out / "results.json").write_text(json.dumps(results.to_json(found, _about(unshaped)), indent=1))
    _write(found, args.out)
    return 0 if all(each.exact for each in found if each.peer not in results.PEERS and not each.failed) else 1


def _earlier(path: pathlib.Path, chosen: list[Scenario]) -> list[results.Result]:
    anew = {scenario.name for scenario in chosen}
    return [each for each in results.from_json(json.loads(path.read_text())) if each.scenario not in anew]


def _write(found: list[results.Result], out: pathlib.Path) -> None:
    order = [scenario.name for scenario in scenarios()]
    found.sort(key=lambda each: order.index(each.scenario))
    shown = [scenario for scenario in scenarios() if any(each.scenario == scenario.name for each in found)]
    parts = [results.table(each, [one for one in found if one.scenario == each.name]) for each in shown]
    (out / "table.md").write_text("\n\n".join([*parts, results.LEGEND]) + "\n")
    try:
        drawn = plots.draw(found, out)
    except ImportError:
        print("No plots: matplotlib is not installed (pip install 'orbax-ext[bench]').")
        drawn = []
    print("Wrote", *(str(path) for path in (out / "results.json", out / "table.md", *drawn)))


def run(scenario: Scenario, peers: list[str], repeat: int, oldest: str | None, unshaped: str) -> list[results.Result]:
    """Restores a scenario by each way; `unshaped` says why links can't be shaped, if so."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
        root = pathlib.Path(folder)
        path = str(root / "checkpoint")
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT) as cluster:
            cluster.run(work.save, scenario, path)
        with contextlib.nullcontext() if unshaped else network.Network(scenario.hosts, scenario.links, root) as net:
            found = []
            for peer in peers:
                runs: list[results.Run] = []
                times = 1 if peer == _OLDEST else repeat  # it is there to be seen beside the newest
                while len(runs) < times and sum(run.seconds for run in runs) < _LONG:
                    # New processes each time: what one restore leaves in memory is not the next one's.
                    with _hosts(scenario, net, oldest if peer == _OLDEST else None) as cluster:
                        runs.append(_measure(scenario, path, peer, cluster, net))
                    if runs[-1].error:
                        break
                found.append(results.result(scenario, peer, runs))
                print(f"  {peer:14} {_in_words(runs)}", flush=True)
            return found


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
    scenario: Scenario, path: str, peer: str, cluster: lab.Cluster, net: network.Network | None
) -> results.Run:
    before = net.bytes_served() if net else [0]
    outcomes = cluster.outcomes(work.restore, scenario, path, peer, net.url if net else "")
    served = sum(net.bytes_served()) - sum(before) if net else 0
    bad = next((outcome for outcome in outcomes if not outcome.ok), None)
    if bad is not None:
        return results.Run(0.0, False, 0, 0, 0, 0.0, 0.0, error=str(bad).splitlines()[0][:200])
    found: list[work.Measured] = [outcome.value for outcome in outcomes]
    seconds = max(each.ended for each in found) - min(each.started for each in found)
    return results.Run(
        seconds,
        all(each.exact for each in found),
        served,
        max(each.fabric_received for each in found) - (served // scenario.hosts if scenario.links.shared else 0),
        max(each.peak for each in found),
        max(each.compile_seconds for each in found),
        1 - max(each.idle_seconds for each in found) / (os.cpu_count() or 1) / seconds,
        report=found[0].report,
    )


def _in_words(runs: list[results.Run]) -> str:
    failed = next((run.error for run in runs if run.error), "")
    return failed or ", ".join(f"{run.seconds:.2f} s{'' if run.exact else ' (not exact)'}" for run in runs)


def _about(unshaped: str) -> dict[str, str]:
    packages = ("orbax-checkpoint", "jax", "tensorstore")
    return {
        "shaped": unshaped or "yes",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        **{name: importlib.metadata.version(name) for name in packages},
    }


if __name__ == "__main__":
    sys.exit(main())
