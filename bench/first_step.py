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
from bench.network import Links
from bench.scenarios import Scenario, bytes_per_second, scenarios
from orbax_ext import lab
from tools import markdown, releases

WAYS = ("plain", "register()", "restore_async", 'restore_async, exchange="background"')
STATE = "dense"
DATA = releases.ROOT / "bench/results/first_step.json"
_LIMIT = 300.0  # seconds for one start
_TO_REACH = 1.15  # times the longer of the two alone, by `restore_async`
_PROBE = 40  # layers that are compiled to find out how long one takes
_CORES = os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Who compiles, for how long, and the links meanwhile."""

    name: str
    links: Links
    one_compiles: bool = False
    long: bool = False  # compiling takes as long as plain Orbax needs to restore; otherwise, as `register()` does
    ways: Sequence[str] = WAYS


_OURS = WAYS[1:]  # where links are slow, plain Orbax takes minutes, and its result is known
CASES = (
    Case("each compiles", Links(320, 1600)),
    Case("one compiles", Links(200, 1000), one_compiles=True, long=True, ways=_OURS),
    Case("one compiles a shorter step", Links(80, 400), one_compiles=True, ways=_OURS),
)

PAGE = markdown.Page(
    "bench/results/first_step.md",
    "Seconds to the end of the first step, measured",
    f"""The state of `{STATE}`: four hosts with two devices each, dp=4 x tp=2, restore 1 GiB, compile a
    step and run it. The step has as many unrolled layers as make compiling take about as long as the restore by
    `register()`, or as long as plain Orbax needs for it at least. "x limit" is relative to the longer of the two alone,
    compiling and the restore by `register()`, from the same start on the same hosts, as often as each way; the step
    itself, which belongs to all ways but to neither of the two alone, counts as lost time. Then comes whether that is
    what `restore_async` is to reach, and the seconds of the parts, in `result()` since the
    last process called it.""",
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
    "same loss",
)
ABOUT = f"""All four hosts share the {_CORES} cores of this machine. A real host has its own. So there are two
conditions:

- *each compiles*: every process compiles the step, as JAX does by default. Four compilations keep both cores busy
  without any restore, so whatever a restore needs of them comes on top, overlapped or not.
- *one compiles*: process 0 compiles for all, and the others load what it has compiled
  (`jax.experimental.serialize_executable`), which costs them processor time too. On links slower than those of
  `{STATE}` the same bytes, for which the cores work as long as ever, take longer, and so does the program that compiles
  as long: a restore then asks for a smaller part of the cores."""


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

        def compiling(layers: int) -> float:
            with lab.Cluster(self._scenario.hosts, self._scenario.devices, timeout=_LIMIT) as cluster:
                return max(cluster.run(first_step_work.compile_seconds, self._scenario, layers, program))

        few = compiling(_PROBE)
        more_layers = max(2 * _PROBE, round(_PROBE * seconds / few / 2))  # many take more than their share
        more = compiling(more_layers)
        return max(1, round(_PROBE + (seconds - few) * (more_layers - _PROBE) / (more - few)))


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


def plain_seconds(links: Links) -> float:
    """Returns the seconds that plain Orbax needs to restore by the links: every host reads all that it holds."""
    return _scenario(links).host_bytes / bytes_per_second(links.storage)


def left_to_exchange(links: Links, seconds: float) -> float:
    """Returns the seconds that exchanges take at least which begin after so many seconds of reading.

    First a process reads its share, then whole groups, of which it need not receive anything.
    """
    scenario, storage, fabric = _scenario(links), bytes_per_second(links.storage), bytes_per_second(links.fabric)
    share = scenario.host_bytes / scenario.replicas
    whole = min(1.0, max(0.0, storage * seconds - share) / scenario.host_bytes)
    return max(0.0, share / storage - seconds) + (1 - whole) * (scenario.host_bytes - share) / fabric


def measure(bench: Bench, case: Case, repeat: int) -> dict[str, Any]:
    """Measures a case: each part alone, then all ways; of several runs, the one in the middle."""

    def run_of(way: str, layers: int) -> list[first_step_work.FirstStep]:
        return sorted((bench.run(way, layers) for _ in range(repeat)), key=_seconds)[repeat // 2]

    restore = run_of("restore", 0)
    layers = bench.layers_for(plain_seconds(case.links) if case.long else _seconds(restore))
    alone = {"restore": restore, "compile": run_of("compile", layers)}
    found: dict[str, Any] = {"layers": layers, "alone": {name: _figures(run) for name, run in alone.items()}}
    print(found, flush=True)
    found["ways"], loss = {}, b""
    for way in case.ways:
        run = run_of(way, layers)
        loss = loss or run[0].loss
        found["ways"][way] = {**_figures(run), "same": all(one.loss == loss for one in run)}
        print(way, found["ways"][way], flush=True)
    return found


def _figures(run: Sequence[first_step_work.FirstStep]) -> dict[str, float]:
    parts = {
        "compiled": max(one.compiled for one in run),
        "restored": max(one.restored for one in run) - max(one.asked for one in run),  # all have to ask for it
        "stepped": max(one.stepped for one in run),
    }
    figures = {"seconds": _seconds(run), "processor": _processor_seconds(run), **parts}
    return {name: round(figure, 2) for name, figure in figures.items()}


def rows(case: Case, found: Mapping[str, Any]) -> list[list[str]]:
    """Returns the rows of a case."""
    limit = max(found["alone"][part]["seconds"] for part in ("restore", "compile"))
    table = []
    for way, one in found["ways"].items():
        times = one["seconds"] / limit
        parts = [f"{one[part]:.2f}" for part in ("compiled", "restored", "stepped")]
        row = [case.name, way, f"{one['seconds']:.2f}", f"{times:.2f}", judged(way, times), *parts]
        table.append([*row, f"{one['processor']:.0f}", "yes" if one["same"] else "**no**"])
    return table


def about(case: Case, found: Mapping[str, Any]) -> str:
    """Returns what each part takes alone, what the processors do, and what the links need at least."""
    alone, one_by_one = found["alone"], found["ways"]["register()"]["processor"]
    restore, compiling = alone["restore"], alone["compile"]
    limit = max(restore["seconds"], compiling["seconds"])
    left = left_to_exchange(case.links, compiling["seconds"])
    return (
        f"- *{case.name}*: storage {case.links.storage} Mbit/s, fabric {case.links.fabric}; {found['layers']} layers. "
        f"Alone, the restore takes {restore['seconds']:.2f} s and "
        f"{restore['processor']:.0f} processor seconds, compiling {compiling['seconds']:.2f} s and "
        f"{compiling['processor']:.0f}. One after the other all took {one_by_one:.0f} processor seconds, "
        f"which {_CORES} cores have in {one_by_one / _CORES:.1f} s, {one_by_one / _CORES / limit:.2f}x. With the "
        f"exchange in `result()`, the links need {left:.1f} s more than compiling: at least "
        f"{(compiling['seconds'] + left) / limit:.2f}x."
    )


def write(kept: Mapping[str, Any]) -> None:
    """Writes the page from all cases that were measured."""
    measured = [case for case in CASES if case.name in kept]
    table = markdown.table(HEAD, [row for case in measured for row in rows(case, kept[case.name])])
    left = "".join(f"\n- *{case.name}*: not measured yet." for case in CASES if case.name not in kept)
    PAGE.write(table, ABOUT, "\n".join(about(case, kept[case.name]) for case in measured) + left)


def _scenario(links: Links) -> Scenario:
    return dataclasses.replace(next(one for one in scenarios() if one.name == STATE), links=links)


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
    kept = json.loads(DATA.read_text()) if DATA.exists() else {}
    for case in sorted((one for one in CASES if one.name in args.only), key=lambda one: args.only.index(one.name)):
        with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
            bench = Bench(_scenario(case.links), case, pathlib.Path(folder), not unshaped)
            kept[case.name] = measure(bench, case, args.repeat)
        for row in rows(case, kept[case.name]):
            print(markdown.row(row))
        print(about(case, kept[case.name]), flush=True)
        if args.write:
            DATA.write_text(json.dumps(kept, indent=1) + "\n")
    if args.write:
        write(kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
