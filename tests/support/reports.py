"""Reports of restores that did not happen: the figures are made up, the structure is real."""

from __future__ import annotations

import random

from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.report import RestoreReport
from orbax_ext.report.spans import Span, seconds_by_phase

STARTED = 1_790_000_000.0


def make_report(processes: int, groups: int = 4, *, slow: int | None = None, seed: int = 0) -> RestoreReport:
    """Returns a report in which all processes read a share of each group and exchange it while they read the next.

    The process `slow` takes three times as long to read.
    """
    chance = random.Random(seed)
    spans: dict[int, list[Span]] = {process: [] for process in range(processes)}
    now = [0.0] * processes
    free = 0.0  # when the previous exchange is over

    def work(process: int, phase: str, seconds: float, group: int | None = None, count: int = 0) -> None:
        spans[process].append(Span(phase, now[process], now[process] + seconds, group, count))
        now[process] += seconds

    def meet(note: str) -> None:
        last = max(range(processes), key=lambda process: now[process])
        end = now[last] + 0.003
        for process in range(processes):
            spans[process].append(Span("wait", now[process], end, waited_for=last, note=note))
            now[process] = end

    for process in range(processes):
        work(process, "describe", 0.05 + chance.random() * 0.05)
    meet("arrive")
    for process in range(processes):
        work(process, "compile", 0.4 + chance.random() * 0.3)
    meet("compile")
    for group in range(groups):
        for process in range(processes):
            pace = 3.0 if process == slow else 1.0
            work(process, "read", pace * (0.5 + chance.random() * 0.25), group, 256_000_000)
            now[process] = max(now[process], free)
        meet(f"read group {group + 1} of {groups}")
        free = now[0] + 0.3
        for process in range(processes):
            spans[process].append(Span("exchange", now[process], free, group))
    now = [free] * processes
    meet("hand over")
    members = {
        process: ProcessReport(
            process,
            f"host-{process // 8}",
            STARTED,
            seconds_by_phase(own),
            tuple(sorted(own, key=lambda span: span.start)),
            bytes_read=groups * 256_000_000,
            requests=groups * 40,
            bytes_received=groups * 256_000_000 * (processes - 1),
            bytes_sent=groups * 256_000_000 * (processes - 1),
            host_peak_bytes=3_000_000_000,
        )
        for process, own in spans.items()
    }
    strategy = {f"layer_{number}": "spread" for number in range(32)} | {"rng": "direct: it is a typed PRNG key"}
    return RestoreReport(0, processes, members, len(strategy), groups, strategy)
