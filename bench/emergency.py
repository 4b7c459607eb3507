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
from collections.abc import Sequence

from bench import emergency_work, network
from bench.network import Links
from bench.scenarios import MIB, Scenario, bytes_per_second
from orbax_ext import lab
from tools import markdown

IMPLEMENTATIONS = ("stock", "orbax_ext")
_LIMIT = 900.0  # seconds for one restore

PAGE = markdown.Page(
    "bench/results/emergency.md",
    "Seconds to restore after the loss of hosts, measured",
    """Four hosts with two devices each, dp=4 x tp=2, so that every host holds the whole state. Storage is behind links
    of 80 Mbit/s, the fabric has 1600 Mbit/s a host, and local directories are on the machine's own disk, not shaped.
    "plain" is Orbax's `ArrayHandler`, which reads all from storage, "stock" the emergency manager, and "orbax_ext" the
    same manager after `register()`. "limit" is what the links allow. The median of the runs is shown; "x stock" and "x
    plain" say how many times as fast as those a restore is.""",
    "make bench-emergency",
)


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


_PLAIN = Case("plain", "whatever the hosts have", ())
CASES = (
    Case("all_have_it", "all hosts have the step", (0, 1, 2, 3)),
    Case("one_host_lost", "one host has lost it", (1, 2, 3)),
    Case("two_hosts_lost", "two hosts have lost it", (2, 3)),
    Case("one_replica", "only one replica has it", (3,)),
    Case("nobody", "nobody has it", ()),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Medians of several restores; bytes are those of the host that had most, but `served` those of all."""

    seconds: float
    served: float
    received: float
    peak: float
    exact: bool


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


def measure(scenario: Scenario, implementation: str, root: pathlib.Path, unshaped: str, repeat: int) -> Measured:
    """Restores several times, each time on processes that have just started."""
    local, storage = root / "local", root / "storage"
    runs: list[list[emergency_work.Restore]] = []
    with contextlib.nullcontext() if unshaped else network.Network(scenario.hosts, scenario.links, storage) as net:
        where = {} if net is None else {"host": net.coordinator, "command_prefix": net.command_prefix}
        for _ in range(repeat):
            with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT, **where) as cluster:  # type: ignore[arg-type]
                directories = str(local), str(storage / "persistent")
                url = net.url if net else ""
                runs.append(cluster.run(emergency_work.restore, scenario, *directories, implementation, url))
        served = sum(net.bytes_served()) / repeat if net else 0.0
    return Measured(
        seconds=statistics.median(_seconds(run) for run in runs),
        served=served,
        received=statistics.median(max(one.fabric_received for one in run) for run in runs),
        peak=statistics.median(max(one.peak for one in run) for run in runs),
        exact=all(one.exact for run in runs for one in run),
    )


def _seconds(run: Sequence[emergency_work.Restore]) -> float:
    return max(one.ended for one in run) - min(one.started for one in run)


HEAD = ("case", "restored by", "seconds", "x stock", "x plain", "x limit", "from storage", "fabric", "memory", "exact")


def _row(scenario: Scenario, case: Case, implementation: str, measured: dict[str, Measured]) -> list[str]:
    this, limit = measured[implementation], case.limit(scenario)
    return [
        case.about,
        implementation,
        f"{this.seconds:.2f}",
        *(f"{measured[other].seconds / this.seconds:.1f}" if other in measured else "" for other in ("stock", "plain")),
        f"{this.seconds / limit:.2f}" if limit else "",
        f"{this.served / scenario.unique_bytes:.2f}",
        f"{this.received / scenario.host_bytes:.2f}",
        f"{this.peak / scenario.host_bytes:.2f}",
        "yes" if this.exact else "**no**",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.emergency", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="MiB of the state (512)")
    parser.add_argument("--repeat", type=int, default=3, help="how often each restore is run (3)")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="some of the cases")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    scenario, unshaped = make_scenario(args.mib), network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
    with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
        root = pathlib.Path(folder)
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT) as cluster:
            cluster.run(emergency_work.save, scenario, str(root / "saved"), str(root / "storage" / "persistent"))
        print(markdown.row(HEAD), flush=True)
        plain = measure(scenario, "plain", root, unshaped, args.repeat)
        rows = [_row(scenario, _PLAIN, "plain", {"plain": plain})]
        print(markdown.row(rows[-1]), flush=True)
        for case in CASES:
            if args.only and case.name not in args.only:
                continue
            keep(case, root)
            measured = {"plain": plain}
            for implementation in IMPLEMENTATIONS:
                measured[implementation] = measure(scenario, implementation, root, unshaped, args.repeat)
                rows.append(_row(scenario, case, implementation, measured))
                print(markdown.row(rows[-1]), flush=True)
    if args.write:
        legend = (
            f"State: {scenario.unique_bytes // MIB} MiB. From storage: bytes read by all hosts, relative to the state. "
            "Fabric: bytes received by the host that received most, and memory: peak resident memory above the start, "
            "both relative to what a host holds in the end."
        )
        PAGE.write(markdown.table(HEAD, rows), legend)
    return 0


if __name__ == "__main__":
    sys.exit(main())
