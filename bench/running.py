"""Runs the restores of a scenario: hosts and links for them, the load beside them, and what they measured."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence

from bench import busy as busy_lib
from bench import estimates, network, results, steering, work
from bench.scenarios import Scenario
from bench.strategies import AUTO, BEFORE, OTHER_CODE, PLAIN, SPREAD, STOCK_OLDEST, VERIFIED
from orbax_ext import lab

_LONG = 75.0  # seconds after which a restore is not run again, but for `auto`


@dataclasses.dataclass(frozen=True)
class Settings:
    """How scenarios are run."""

    repeat: int | None = None  # instead of the scenario's own
    auto_runs: int = 5
    oldest: str | None = None  # the interpreter of an environment with the oldest release
    before: pathlib.Path | None = None  # the other checkout of `BEFORE`
    unshaped: str = ""  # why links can't be limited here
    commit: str = ""

    def times(self, scenario: Scenario, strategy: str) -> int:
        """Returns how often a restore is run."""
        if strategy == AUTO:
            return self.auto_runs
        if strategy == STOCK_OLDEST:
            return 1  # once is enough to compare it with the newest
        return self.repeat or (scenario.repeat if strategy in (PLAIN, SPREAD, VERIFIED, BEFORE) else 1)

    def strategies(self, scenario: Scenario, busy: bool, wanted: Sequence[str]) -> list[str]:
        """Returns those of the wanted strategies that the scenario has, and that can run here."""
        missing = {STOCK_OLDEST: self.oldest is None, BEFORE: self.before is None}
        return [strategy for strategy in scenario.measured(busy) if strategy in wanted and not missing.get(strategy)]


@dataclasses.dataclass(frozen=True)
class Step:
    """All runs of a scenario with one strategy, quiet or busy."""

    scenario: Scenario
    busy: bool
    strategy: str
    times: int


def steps(scenario: Scenario, conditions: Sequence[bool], wanted: Sequence[str], settings: Settings) -> list[Step]:
    """Returns what is to be run of a scenario; `conditions` says whether quiet (False), busy, or both."""
    return [
        Step(scenario, busy, strategy, settings.times(scenario, strategy))
        for busy in conditions
        for strategy in settings.strategies(scenario, busy, wanted)
    ]


def is_done(step: Step, earlier: Sequence[results.Result], settings: Settings) -> bool:
    """Returns whether there is a result of the step at this commit; one of other code may be of any commit."""
    return any(
        (result.scenario, result.busy, result.strategy) == (step.scenario.name, step.busy, step.strategy)
        and (result.commit == settings.commit or (step.strategy in OTHER_CODE and result.commit != ""))
        and (len(result.runs) >= step.times or bool(result.failed) or _is_long(step, result.runs))
        for result in earlier
    )


def run(
    scenario: Scenario,
    todo: Sequence[Step],
    settings: Settings,
    begins: Callable[[Step], bool] = lambda step: True,
) -> Generator[results.Result]:
    """Saves the scenario's state once, and yields the result of each step; ends before one that may not begin."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder:
        root = pathlib.Path(folder)
        path = str(root / "checkpoint")
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=scenario.time_limit) as cluster:
            cluster.run(work.save, scenario, path)
        if any(step.strategy == VERIFIED for step in todo):
            _write_digests(path)
        with contextlib.ExitStack() as stack:
            net = servers = None
            if not scenario.local and not settings.unshaped:
                net = stack.enter_context(network.Network(scenario.hosts, scenario.links, root))
                servers = stack.enter_context(lab.ForkServers())
            hosts = Hosts(root, net, servers)
            done: list[results.Result] = []
            for step in itertools.takewhile(begins, todo):
                if not done:
                    _warm_up(scenario, hosts, settings)
                done.append(_run_step(step, hosts, settings, most_seconds(step, done)))
                yield done[-1]


def _warm_up(scenario: Scenario, where: Hosts, settings: Settings) -> None:
    """Restores once without counting it: the first restore on new hosts takes up to a third longer than the next."""
    step = Step(scenario, False, AUTO, 1)
    with processes(step, where, settings) as cluster:
        _measure(step, where, cluster, scenario.time_limit)


def most_seconds(step: Step, done: Sequence[results.Result]) -> float:
    """Returns the seconds after which a restore is ended."""
    worst = [result.worst for result in done if result.busy and result.strategy == AUTO and not result.failed]
    if step.busy and step.strategy != AUTO and worst:
        return min(step.scenario.time_limit, estimates.most_busy(worst[0]))
    return step.scenario.time_limit


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Where a scenario's processes run."""

    root: pathlib.Path  # of the checkpoint and other files
    net: network.Network | None = None  # None: on this machine itself
    fork_servers: lab.ForkServers | None = None


def _run_step(step: Step, where: Hosts, settings: Settings, most: float) -> results.Result:
    runs: list[results.Run] = []
    while len(runs) < step.times and not _is_long(step, runs):
        # New processes each time, so that no restore profits from what an earlier one left in memory.
        with processes(step, where, settings) as cluster:
            runs.append(_measure(step, where, cluster, most))
        if runs[-1].error:
            break
    commit = commit_of(settings.before) if step.strategy == BEFORE and settings.before else settings.commit
    return results.result(step.scenario, step.strategy, runs, busy=step.busy, commit=commit)


def _is_long(step: Step, runs: Sequence[results.Run]) -> bool:
    return step.strategy != AUTO and sum(run.seconds for run in runs) >= _LONG


@contextlib.contextmanager
def processes(step: Step, where: Hosts, settings: Settings) -> Iterator[lab.Cluster]:
    """Starts the processes of all hosts, with the release and the code that the step is about."""
    net = where.net
    network_of = {} if net is None else {"host": net.coordinator, "command_prefix": net.command_prefix}
    environment = {"PYTHONWARNINGS": "ignore"}
    if step.strategy == BEFORE and settings.before is not None:
        environment |= _environment_of(settings.before, where.root / "before")
    with lab.Cluster(
        step.scenario.hosts,
        step.scenario.devices,
        timeout=step.scenario.time_limit,
        env=environment,
        python=settings.oldest if step.strategy == STOCK_OLDEST and settings.oldest else sys.executable,
        fork_servers=where.fork_servers,
        **network_of,  # type: ignore[arg-type]
    ) as cluster:
        yield cluster


def _environment_of(checkout: pathlib.Path, folder: pathlib.Path) -> dict[str, str]:
    """Returns variables with which a process imports the package of another checkout, and nothing else of it."""
    folder.mkdir(exist_ok=True)
    link = folder / "orbax_ext"
    if not link.is_symlink():
        link.symlink_to((checkout / "orbax_ext").resolve(strict=True))
    # Without the safe path, `python -m` looks into the working directory first, and finds the present code there.
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def _measure(step: Step, where: Hosts, cluster: lab.Cluster, most: float) -> results.Run:
    scenario, net, started = step.scenario, where.net, where.root / "started"
    started.unlink(missing_ok=True)
    before = net.bytes_served() if net else [0]
    with contextlib.ExitStack() as stack:
        if net is not None:
            stack.enter_context(steering.changing(net, scenario.changes, started))
        if step.busy:
            stack.enter_context(busy_lib.all_cores(scenario.time_limit))
        path, url = str(where.root / "checkpoint"), net.url if net else ""
        outcomes = cluster.outcomes(work.restore, scenario, path, step.strategy, url, str(started), timeout=most)
    served = sum(net.bytes_served()) - sum(before) if net else 0
    bad = next((outcome for outcome in outcomes if not outcome.ok), None)
    if bad is not None:
        late = f"did not end within {most:.0f} s"
        error = late if bad.state == "timed out" else str(bad).splitlines()[0][:200]
        return results.Run(0.0, False, 0, 0, 0, 0.0, 0.0, error=error)
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
        sum(restore.processor_seconds for restore in restores),
        report=restores[0].report,
    )


def _write_digests(path: str) -> None:
    command = [sys.executable, "-m", "orbax_ext.cli", "verify", "--write", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)


def commit_of(checkout: pathlib.Path) -> str:
    """Returns the commit of a checkout, with a plus if the code has changed since; empty if it is none."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    return commit + "+" if commit and git("status", "--porcelain", "--", "orbax_ext", "bench/*.py") else commit
