"""Compares the seconds that `orbax-ext plan` would have predicted for the benchmark's restores with those measured.

python -m bench.predictions [build/bench/results.json]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from bench import results as results_lib
from bench.results import Result
from bench.scenarios import Scenario, bytes_per_second, scenarios
from orbax_ext.options import Strategy
from orbax_ext.plan import Rates
from orbax_ext.plan.forecast import described, forecast, notation
from tools import markdown

PAGE = markdown.Page(
    "bench/results/predictions.md",
    "Seconds to restore, predicted and measured",
    """What the cost model (`orbax_ext/plan/cost.py`) expects of the restores in [speed.md](speed.md), from the rates of
    the links alone. It does not model how busy the processors are (the column `cores` there).""",
    "make docs",
)
PREDICTED: Mapping[str, Strategy] = {"plain": "direct", "single": "single", "spread": "spread", "auto": "auto"}
_PLENTY = 1 << 40  # bytes: memory is no constraint of these scenarios


def predict(scenario: Scenario, strategy: Strategy) -> float:
    """Returns the seconds that the cost model expects on the scenario's links."""
    mesh = forecast.mesh_on(scenario.mesh, scenario.hosts)
    leaves, _ = described.place(model(scenario), mesh, [])

    def at(rates: Rates) -> forecast.Forecast:
        return forecast.forecast(leaves, mesh, scenario.hosts, rates, _PLENTY, strategy, scenario.replica_axis)

    expected = at(link_rates(scenario))
    received = int(expected.volumes.received.max())
    if scenario.links.shared and received:  # storage and fabric each get the part of the link that they need
        part = received / (received + int(expected.volumes.read.max()))
        link = bytes_per_second(scenario.links.fabric)
        expected = at(Rates(link * (1 - part), link * part))
    return expected.seconds


def model(scenario: Scenario) -> list[described.Described]:
    """Returns the scenario's leaves as they are stored: where all replicas save, each writes a part of a shard."""
    spec: notation.Spec = tuple((axis,) if axis else () for axis in scenario.spec)
    chunk = list(notation.block_shape(spec, scenario.leaf, dict(scenario.mesh)))
    if scenario.replica_parallel:
        dim = next((dim for dim, size in enumerate(chunk) if size % scenario.replicas == 0), None)
        if dim is not None:
            chunk[dim] //= scenario.replicas
    names = (f"leaf_{number}" for number in range(scenario.leaves))
    return [described.Described(name, scenario.leaf, "bfloat16", spec, tuple(chunk)) for name in names]


def link_rates(scenario: Scenario) -> Rates:
    """Returns the links in bytes per second; a link for both storage and fabric counts in full for each."""
    links = scenario.links
    storage, fabric, total = map(bytes_per_second, (links.to_storage, links.fabric, links.storage_total))
    return Rates(storage, fabric, total)


def _is_modelled(scenario: Scenario) -> bool:
    """Returns whether links alone set the pace, at rates that stay the same."""
    return not scenario.local and not scenario.links.latency and not scenario.changes


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table of seconds predicted and measured, with the median and the largest error."""
    known = {scenario.name: scenario for scenario in scenarios() if _is_modelled(scenario)}
    rows, errors = [], []
    for result in results:
        if result.busy or result.failed or result.strategy not in PREDICTED or result.scenario not in known:
            continue
        seconds = predict(known[result.scenario], PREDICTED[result.strategy])
        error = (seconds - result.seconds) / result.seconds
        rows.append((result.scenario, result.strategy, f"{seconds:.2f}", f"{result.seconds:.2f}", f"{error:+.0%}"))
        errors.append(abs(error))
    lines = markdown.table(("scenario", "strategy", "predicted s", "measured s", "error"), rows)
    if not errors:
        return lines
    return f"{lines}\n\nError: {statistics.median(errors):.0%} in the middle, {max(errors):.0%} at worst."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predictions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="?", default=results_lib.RESULTS, help="a results.json")
    print(table(results_lib.load(parser.parse_args(argv).results).results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
