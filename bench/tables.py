"""The page with the benchmark's results: a summary, and a table of each scenario, quiet and busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench import limits
from bench.results import PACKAGES, Result
from bench.scenarios import Scenario, scenarios
from bench.strategies import AUTO, BASELINES, PLAIN, SINGLE, SPREAD, STOCK, STOCK_OLDEST, STRATEGIES
from tools import markdown

QUIET, BUSY = "the machine is otherwise idle", "another program keeps all cores busy"
COLUMNS = (
    *("strategy", "seconds", "fastest", "worst", "runs", "x best Orbax", "x limit", "cpu s/GiB", "storage"),
    *("fabric", "memory", "compile s", "cores", "exact"),
)
_COMPARED = (PLAIN, STOCK, STOCK_OLDEST, SINGLE, SPREAD)


def page(about: Mapping[str, str]) -> markdown.Page:
    packages = ", ".join(f"{name} {about[name]}" for name in PACKAGES)
    if about["shaped"] == "yes":
        links = "Hosts are network namespaces with links shaped by `tc`; storage is an nginx server behind such a link."
    else:
        links = f"Links are not shaped, all hosts share the machine's disk and loopback: {about['shaped']}."
    return markdown.Page(
        "bench/results/speed.md",
        "Seconds to restore, measured",
        f"""The same checkpoint is restored with each strategy, one after the other, in new processes, on one machine
        ({about["machine"]}; {packages}). {links} The same is measured once more while another program keeps all cores
        busy: an endless loop for each core, at normal priority (not niced). Scenarios may have been measured at
        different times and commits: compare rows of one table. "plain" is Orbax's `ArrayHandler`, "stock" its
        `SingleReplicaArrayHandler`, "auto before" the code of an earlier commit, and the other rows are strategies of
        orbax_ext. `auto` is run at least five times unless it fails, the others as often as the table says. With its
        defaults the stock handler takes seven times the state; where the machine has too little memory for that,
        `broadcast_memory_limit_bytes` is set for it.""",
        "make bench",
    )


def parts(results: Sequence[Result]) -> tuple[str, ...]:
    """Returns the summaries, the tables of all scenarios that were measured, and the legend."""
    texts = [LEGEND]
    for busy, condition in ((False, QUIET), (True, BUSY)):
        if some := [result for result in results if result.busy == busy]:
            texts.append(f"## Summary: {condition}\n\n{summary(some)}")
    texts.append("## Scenarios")
    for scenario in scenarios():
        for busy in (False, True):
            rows = [result for result in results if result.condition == (scenario.name, busy)]
            texts += [table(scenario, rows)] if rows else []
    return tuple(texts)


def summary(results: Sequence[Result]) -> str:
    """Returns one row of seconds for each scenario."""
    head = ("scenario", *_COMPARED, "auto", "auto, worst", "limit", "auto / limit", "cpu s/GiB: plain", "auto")
    known = {(result.scenario, result.strategy): result for result in results}
    rows = []
    for name in (scenario.name for scenario in scenarios()):
        if not (some := [result for result in results if result.scenario == name]):
            continue
        auto, limit = known.get((name, AUTO)), some[0].limit
        rows.append(
            (
                name,
                *(_seconds(known.get((name, strategy))) for strategy in _COMPARED),
                _seconds(auto),
                "-" if auto is None or auto.failed else f"{auto.worst:.2f}",
                f"{limit:.2f}" if limit else "-",
                "-" if auto is None else _times(auto, limit),
                *(_processor(known.get((name, strategy))) for strategy in (PLAIN, AUTO)),
            )
        )
    return markdown.table(head, rows)


def table(scenario: Scenario, results: Sequence[Result]) -> str:
    """Returns the Markdown table of one scenario, quiet or busy."""
    orbax = [result.seconds for result in results if result.strategy in BASELINES and not result.failed]
    best = min(orbax, default=0.0)
    limit = f"; limit {scenario.limit():.2f} s" if scenario.limit() else ""
    commits = sorted({result.commit for result in results if result.commit})
    measured = f"; measured at {', '.join(commits)}" if commits else ""
    condition = f" ({BUSY})" if results[0].busy else ""
    title = f"**{scenario.name}**{condition}: {scenario.about}; {_links(scenario)}{limit}{measured}"
    order = {strategy: number for number, strategy in enumerate(STRATEGIES)}
    rows = sorted(results, key=lambda result: order.get(result.strategy, len(order)))
    return f"{title}\n\n{markdown.table(COLUMNS, [_cells(result, best) for result in rows])}"


def _cells(result: Result, best: float) -> list[str]:
    if result.failed:
        return [result.strategy, result.failed, *[""] * (len(COLUMNS) - 2)]
    return [
        result.strategy,
        f"{result.seconds:.2f}",
        f"{result.fastest:.2f}",
        f"{result.worst:.2f}",
        f"{len(result.runs)}",
        _times(result, best),
        _times(result, result.limit),
        _processor(result),
        f"{result.median('storage_bytes') / result.unique_bytes:.2f}",
        f"{result.median('fabric_bytes') / result.fabric_least:.2f}",
        f"{result.median('peak_bytes') / result.host_bytes:.2f}",
        f"{result.median('compile_seconds'):.2f}",
        f"{100 * result.median('busy'):.0f} %",
        "yes" if result.exact else "**no**",
    ]


def _seconds(result: Result | None) -> str:
    if result is None:
        return "-"
    return "failed" if result.failed else f"{result.seconds:.2f}"


def _times(result: Result, of: float) -> str:
    return f"{result.seconds / of:.2f}" if of and not result.failed else "-"


def _processor(result: Result | None) -> str:
    if result is None or result.failed or not result.processor_seconds:
        return "-"
    return f"{result.processor_seconds:.1f}"


LEGEND = f"""\
- seconds: the median of all runs; fastest, worst: of them
- x best Orbax: relative to the fastest of Orbax's own handlers in the same table
- x limit: relative to what the links allow, see below
- cpu s/GiB: processor seconds of the processes of all hosts, for each GiB of the state
- storage: bytes read by all hosts, relative to the state; on the local disk they are not counted
- fabric: bytes received by a host, relative to (R-1)/R of what it holds, with R replicas; over loopback not counted
- memory: peak resident memory above the start, relative to what a host holds in the end
- cores: how busy the machine was

{limits.FORMULA}"""


def _links(scenario: Scenario) -> str:
    links, hosts = scenario.links, f"{scenario.hosts} hosts"
    if scenario.local:
        return f"{hosts}, local disk, links not limited"
    if links.shared:
        return f"{hosts}, {links.fabric} Mbit/s for both storage and fabric"
    cap = f" ({links.storage_total} in all)" if links.storage_total else ""
    return f"{hosts}, storage {links.storage}{cap} and fabric {links.fabric} Mbit/s per host"
