"""What `orbax-ext plan` would have said of the benchmark's restores, beside what was measured.

Run it on the benchmark's results: python -m orbax_ext.lab.bench.predictions build/bench/results.json
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from bench.results import Result, from_json
from bench.scenarios import Scenario, bytes_per_second, scenarios
from orbax_ext.options import Strategy
from orbax_ext.plan import Rates
from orbax_ext.plan.forecast import described, forecast, notation

WAYS: Mapping[str, Strategy] = {"plain": "direct", "single": "single", "spread": "spread", "auto": "auto"}
_PLENTY = 1 << 40  # bytes: memory is no constraint of these scenarios


def predict(scenario: Scenario, strategy: Strategy) -> float:
    """Seconds, by the cost model and the scenario's links."""
    mesh = forecast.mesh_on(scenario.mesh, scenario.hosts)
    leaves, _ = described.place(model(scenario), mesh, [])

    def at(given: Rates) -> forecast.Forecast:
        return forecast.forecast(leaves, mesh, scenario.hosts, given, _PLENTY, strategy, scenario.replica_axis)

    found = at(rates(scenario))
    received = int(found.volumes.received.max())
    if scenario.links.shared and received:  # each has the part of the link that it needs
        part = received / (received + int(found.volumes.read.max()))
        link = bytes_per_second(scenario.links.fabric)
        found = at(Rates(link * (1 - part), link * part))
    return found.seconds


def model(scenario: Scenario) -> list[described.Described]:
    """The scenario's state as it is stored: where all replicas save, each writes a part of a shard."""
    spec: notation.Spec = tuple((axis,) if axis else () for axis in scenario.spec)
    chunk = list(notation.block_shape(spec, scenario.leaf, dict(scenario.mesh)))
    if scenario.replica_parallel:
        dim = next((dim for dim, size in enumerate(chunk) if size % scenario.replicas == 0), None)
        if dim is not None:
            chunk[dim] //= scenario.replicas
    names = (f"leaf_{number}" for number in range(scenario.leaves))
    return [described.Described(name, scenario.leaf, "bfloat16", spec, tuple(chunk)) for name in names]


def rates(scenario: Scenario) -> Rates:
    """The links in bytes per second; one that carries both storage and fabric is all of it for either."""
    links = scenario.links
    storage, fabric, total = map(bytes_per_second, (links.to_storage, links.fabric, links.storage_total))
    return Rates(storage, fabric, total)


def table(results: Sequence[Result]) -> str:
    """A Markdown table of seconds predicted and measured, and the error in the middle and at worst."""
    known = {scenario.name: scenario for scenario in scenarios()}
    lines = ["| scenario | way | predicted s | measured s | error |", "|---|---|---|---|---|"]
    errors = []
    for found in results:
        if found.failed or found.peer not in WAYS or found.scenario not in known:
            continue
        seconds = predict(known[found.scenario], WAYS[found.peer])
        errors.append((seconds - found.seconds) / found.seconds)
        lines.append(f"| {found.scenario} | {found.peer} | {seconds:.2f} | {found.seconds:.2f} | {errors[-1]:+.0%} |")
    if errors:
        sizes = [abs(error) for error in errors]
        lines += ["", f"Error: {statistics.median(sizes):.0%} in the middle, {max(sizes):.0%} at worst."]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(from_json(json.loads(pathlib.Path(sys.argv[1]).read_text()))))
