"""Restores a step of the emergency manager after the loss of hosts, with stock Orbax and with orbax_ext.

python -m bench.emergency [--mib 512] [--only one_host_lost ...] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence

from bench import emergency_results, emergency_work, network, running
from bench.network import Links
from bench.scenarios import Scenario, bytes_per_second
from orbax_ext import lab
from tools import markdown, releases

_LIMIT = 900.0  # seconds for one restore


@dataclasses.dataclass(frozen=True)
class Case:
    """Which hosts still have the step."""

    name: str
    about: str
    hosts: tuple[int, ...]

    def limit(self, scenario: Scenario) -> float:
        """Returns the seconds that the links need at least; reading from local disks is not counted."""
        if not self.hosts:
            return scenario.limit()
        lacking = len(self.hosts) < scenario.hosts
        return scenario.unique_bytes / bytes_per_second(scenario.links.fabric) if lacking else 0.0


_PLAIN = Case(emergency_results.PLAIN, "whatever the hosts have", ())
CASES = (
    Case("all_have_it", "all hosts have the step", (0, 1, 2, 3)),
    Case(emergency_results.ONE_HOST_LOST, "one host has lost it", (1, 2, 3)),
    Case("two_hosts_lost", "two hosts have lost it", (2, 3)),
    Case("one_replica", "only one replica has it", (3,)),
    Case("nobody", "nobody has it", ()),
)


def make_scenario(mib: int) -> Scenario:
    mesh, leaf = (("dp", 4), ("tp", 2)), (2048, 4096)
    return Scenario("emergency", "loss of hosts", Links(80, 1600), mesh, leaf, ("tp", None), max(1, mib // 16))


def keep(case: Case, root: pathlib.Path) -> None:
    """Lets only the hosts of a case have the step."""
    local = root / "local"
    shutil.rmtree(local, ignore_errors=True)
    for host in case.hosts:
        # The primary replica saves to storage alone; it has the step if it was another one when the job was killed.
        shutil.copytree(root / "saved" / f"host{host or 1}", local / f"host{host}")


def measure(
    scenario: Scenario, case: Case, implementation: str, root: pathlib.Path, unshaped: str, repeat: int
) -> emergency_results.Result:
    """Restores several times, each time on processes that have just started."""
    local, storage = root / "local", root / "storage"
    runs: list[list[emergency_work.Restore]] = []
    with contextlib.ExitStack() as stack:
        net = servers = None
        if not unshaped:
            net = stack.enter_context(network.Network(scenario.hosts, scenario.links, storage))
            servers = stack.enter_context(lab.ForkServers())
        where = {} if net is None else {"host": net.coordinator, "command_prefix": net.command_prefix}
        for _ in range(repeat):
            with lab.Cluster(
                scenario.hosts,
                scenario.devices,
                timeout=_LIMIT,
                fork_servers=servers,
                **where,  # type: ignore[arg-type]
            ) as cluster:
                directories = str(local), str(storage / "persistent")
                url = net.url if net else ""
                runs.append(cluster.run(emergency_work.restore, scenario, *directories, implementation, url))
        served = sum(net.bytes_served()) / repeat if net else 0.0
    seconds = [_seconds(run) for run in runs]
    return emergency_results.Result(
        case.name,
        case.about,
        implementation,
        seconds=statistics.median(seconds),
        runs=tuple(seconds),
        served=served,
        received=statistics.median(max(one.fabric_received for one in run) for run in runs),
        peak=statistics.median(max(one.peak for one in run) for run in runs),
        exact=all(one.exact for run in runs for one in run),
        limit=0.0 if unshaped else case.limit(scenario),
        unique_bytes=scenario.unique_bytes,
        host_bytes=scenario.host_bytes,
        commit=running.commit_of(releases.ROOT),
    )


def _seconds(run: Sequence[emergency_work.Restore]) -> float:
    return max(one.ended for one in run) - min(one.started for one in run)


def run_all(
    scenario: Scenario, cases: Sequence[Case], earlier: Sequence[emergency_results.Result], unshaped: str, repeat: int
) -> Iterator[emergency_results.Result]:
    """Yields a result for each case and implementation, and for plain Orbax unless `earlier` has that."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
        root = pathlib.Path(folder)
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT) as cluster:
            cluster.run(emergency_work.save, scenario, str(root / "saved"), str(root / "storage" / "persistent"))
        same_state = {result.case for result in earlier if result.unique_bytes == scenario.unique_bytes}
        if _PLAIN.name not in same_state:
            yield measure(scenario, _PLAIN, emergency_results.PLAIN, root, unshaped, repeat)
        for case in cases:
            keep(case, root)
            for implementation in (emergency_results.STOCK, emergency_results.OURS):
                yield measure(scenario, case, implementation, root, unshaped, repeat)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.emergency", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="MiB of the state (512)")
    parser.add_argument("--repeat", type=int, default=3, help="how often each restore is run (3)")
    parser.add_argument(
        "--only", nargs="+", choices=[case.name for case in CASES], help="some of the cases; other results are kept"
    )
    page = emergency_results.PAGE
    parser.add_argument("--write", action="store_true", help=f"write {page.path} and the results as JSON beside it")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    scenario, unshaped = make_scenario(args.mib), network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
        if args.write:
            parser.error("results without shaped links are not written")
    results = emergency_results.load() if args.write else []
    print(markdown.row(emergency_results.HEAD), flush=True)
    cases = [case for case in CASES if not args.only or case.name in args.only]
    order = [case.name for case in (_PLAIN, *CASES)]
    for result in run_all(scenario, cases, results if args.only else [], unshaped, args.repeat):
        results = emergency_results.in_order(emergency_results.merged(results, result), order)
        print(markdown.row(emergency_results.row(result, results)), flush=True)
        if args.write:
            emergency_results.save(results)
    print(emergency_results.figures_table(results))
    if args.write:
        page.write(*emergency_results.parts(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
