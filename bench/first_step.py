"""Seconds from the start of a training program to the end of its first step: restore, compile, step.

python -m bench.first_step [--only "each compiles"] [--repeat 1] [--write]

A case that is measured is kept in `bench/results/first_step.json`; the page shows all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from bench import first_step_work, network, work
from bench.scenarios import Scenario, bytes_per_second, scenarios
from orbax_ext import lab
from tools import markdown, releases

WAYS = ("plain", "register()", "restore_async", 'restore_async, exchange="background"')
SCENARIO = "dense"
DATA = releases.ROOT / "bench/results/first_step.json"
_LIMIT = 300.0  # seconds for one start
_TO_REACH = 1.15  # times the longer of the two alone, by `restore_async`
_PROBES = (8, 48)  # layers that are compiled to find out how long one takes
_CORES = os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Who compiles, and for how long."""

    name: str
    one_compiles: bool
    as_long_as: str  # the way whose restore takes as long as compiling


CASES = (
    Case("each compiles", one_compiles=False, as_long_as="register()"),
    Case("one compiles", one_compiles=True, as_long_as="register()"),
    Case("one compiles for long", one_compiles=True, as_long_as="plain"),
)

PAGE = markdown.Page(
    "bench/results/first_step.md",
    "Seconds to the end of the first step, measured",
    f"""The state and links of `{SCENARIO}`: four hosts with two devices each, dp=4 x tp=2, restore 1 GiB, compile a
    step and run it. The step has as many unrolled layers as make compiling take as long as the restore by `register()`,
    or as long as that by plain Orbax. "x limit" is relative to the longer of the two alone, compiling and the restore
    by `register()`, from the same start on the same hosts, as often as each way; the step itself, which belongs to all
    ways but to neither of the two alone, counts as lost time. Then comes whether that is what `restore_async` is to
    reach, and the seconds of the parts.""",
    "make bench-first-step",
)
HEAD = (
    "case",
    "way",
    "seconds",
    "x limit",
    f"at most {_TO_REACH:g}x",
    "compiling",
    "restore or result()",
    "step",
    "processor seconds",
    "same loss as plain",
)
ABOUT = f"""All four hosts share the {_CORES} cores of this machine. A real host has its own. So there are two
conditions:

- *each compiles*: every process compiles the step, as JAX does by default, so four compilations, each in several
  threads, want {_CORES} cores. They take all of both without any restore, and what else has to be done comes on top.
- *one compiles*: process 0 compiles for all, in one thread, and the others load what it has compiled
  (`jax.experimental.serialize_executable`). Then one core is left for reading and exchanging on four hosts, which is
  closer to a host with cores of its own."""


class Bench:
    """One case's checkpoint and hosts."""

    def __init__(self, scenario: Scenario, case: Case, root: pathlib.Path, shaped: bool) -> None:
        self._scenario = scenario
        self._case = case
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
            asked = scenario, self._path, way, layers, "" if net is None else net.url
            with lab.Cluster(scenario.hosts, scenario.devices, timeout=_LIMIT, **where) as cluster:  # type: ignore[arg-type]
                return cluster.run(first_step_work.first_step, *asked, one_compiles=self._case.one_compiles)

    def layers_for(self, seconds: float) -> int:
        """Returns how many layers take so long to compile."""
        program = str(self._root / "probe") if self._case.one_compiles else ""
        took = []
        for layers in _PROBES:
            with lab.Cluster(self._scenario.hosts, self._scenario.devices, timeout=_LIMIT) as cluster:
                took.append(max(cluster.run(first_step_work.compile_seconds, self._scenario, layers, program)))
        each = (took[1] - took[0]) / (_PROBES[1] - _PROBES[0])
        return max(1, round(_PROBES[0] + (seconds - took[0]) / each))


def _seconds(run: Sequence[first_step_work.FirstStep]) -> float:
    return max(one.ended for one in run) - min(one.started for one in run)


def _processor_seconds(run: Sequence[first_step_work.FirstStep]) -> float:
    """Returns how long the cores were busy, all together, by whatever ran: hosts, links, storage."""
    return _seconds(run) * _CORES - max(one.idle_seconds for one in run)


def judged(way: str, times: float) -> str:
    """Returns whether a way meets what `restore_async` is to reach; "" for the ways that are there to compare."""
    if "restore_async" not in way:
        return ""
    return "met" if round(times, 2) <= _TO_REACH else "**not met**"


def left_to_exchange(scenario: Scenario, seconds: float) -> float:
    """Returns the seconds that exchanges take at least which begin after so many seconds of reading.

    First a process reads its share, then whole groups, of which it need not receive anything.
    """
    storage, fabric = bytes_per_second(scenario.links.storage), bytes_per_second(scenario.links.fabric)
    share = scenario.host_bytes / scenario.replicas
    whole = min(1.0, max(0.0, storage * seconds - share) / scenario.host_bytes)
    return max(0.0, share / storage - seconds) + (1 - whole) * (scenario.host_bytes - share) / fabric


def measure(bench: Bench, case: Case, repeat: int) -> dict[str, Any]:
    """Measures a case: each part alone, then all ways; of several runs, the one in the middle."""

    def run_of(way: str, layers: int) -> list[first_step_work.FirstStep]:
        return sorted((bench.run(way, layers) for _ in range(repeat)), key=_seconds)[repeat // 2]

    restore = run_of("restore", 0)
    as_long = run_of("plain restore", 0) if case.as_long_as == "plain" else restore
    layers = bench.layers_for(_seconds(as_long))
    compiling = run_of("compile", layers)
    alone = {"restore": restore, "plain restore": as_long, "compile": compiling}
    found: dict[str, Any] = {"layers": layers, "alone": {name: _figures(run) for name, run in alone.items()}}
    print(found, flush=True)
    found["ways"], loss = {}, b""
    for way in WAYS:
        run = run_of(way, layers)
        loss = loss or run[0].loss
        found["ways"][way] = {**_figures(run), "same": all(one.loss == loss for one in run)}
        print(way, found["ways"][way], flush=True)
    return found


def _figures(run: Sequence[first_step_work.FirstStep]) -> dict[str, float]:
    parts = {part: round(max(getattr(one, part) for one in run), 2) for part in ("compiled", "restored", "stepped")}
    return {"seconds": round(_seconds(run), 2), "processor": round(_processor_seconds(run), 1), **parts}


def rows(name: str, found: Mapping[str, Any]) -> list[list[str]]:
    """Returns the rows of a case."""
    limit = max(found["alone"][part]["seconds"] for part in ("restore", "compile"))
    table = []
    for way, one in found["ways"].items():
        times = one["seconds"] / limit
        parts = [f"{one[part]:.2f}" for part in ("compiled", "restored", "stepped")]
        row = [name, way, f"{one['seconds']:.2f}", f"{times:.2f}", judged(way, times), *parts]
        table.append([*row, f"{one['processor']:.0f}", "yes" if one["same"] else "**no**"])
    return table


def about(scenario: Scenario, name: str, found: Mapping[str, Any]) -> str:
    """Returns what each part takes alone, and what no way can be faster than."""
    alone, one_by_one = found["alone"], found["ways"]["register()"]["processor"]
    restore, compiling = alone["restore"], alone["compile"]
    limit = max(restore["seconds"], compiling["seconds"])
    left = left_to_exchange(scenario, compiling["seconds"])
    return (
        f"- *{name}*: {found['layers']} layers. Alone, the restore takes {restore['seconds']:.2f} s and "
        f"{restore['processor']:.0f} processor seconds, compiling {compiling['seconds']:.2f} s and "
        f"{compiling['processor']:.0f}. One after the other all takes {one_by_one:.0f} processor seconds: on {_CORES} "
        f"cores at least {one_by_one / _CORES:.1f} s, {one_by_one / _CORES / limit:.2f}x. With the exchange in "
        f"`result()`, the links need {left:.1f} s more than compiling: at least "
        f"{(compiling['seconds'] + left) / limit:.2f}x."
    )


def write(kept: Mapping[str, Any], scenario: Scenario) -> None:
    """Writes the page from all cases that were measured."""
    measured = [case.name for case in CASES if case.name in kept]
    table = markdown.table(HEAD, [row for name in measured for row in rows(name, kept[name])])
    PAGE.write(table, ABOUT, "\n".join(about(scenario, name, kept[name]) for name in measured))


def main(argv: Sequence[str] | None = None) -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m bench.first_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="some of the cases")
    parser.add_argument("--repeat", type=int, default=1, help="how often each start is run (1)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}, with what was measured before")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    unshaped = network.why_not()
    if unshaped:
        print(f"Links are not shaped, all hosts share this machine's disk and loopback: {unshaped}.")
    scenario = next(one for one in scenarios() if one.name == SCENARIO)
    kept = json.loads(DATA.read_text()) if DATA.exists() else {}
    for case in (one for one in CASES if one.name in args.only):
        with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
            kept[case.name] = measure(Bench(scenario, case, pathlib.Path(folder), not unshaped), case, args.repeat)
        for row in rows(case.name, kept[case.name]):
            print(markdown.row(row))
        print(about(scenario, case.name, kept[case.name]), flush=True)
    if args.write:
        DATA.write_text(json.dumps(kept, indent=1) + "\n")
        write(kept, scenario)
    return 0


if __name__ == "__main__":
    sys.exit(main())
