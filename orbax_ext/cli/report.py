"""`orbax-ext report`: shows the timeline of a restore as text, as a page, or as a trace."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from orbax_ext import text as text_lib
from orbax_ext.cli import files
from orbax_ext.report import page, timeline
from orbax_ext.report.report import RestoreReport

DESCRIPTION = (
    "Shows a report that last_report().to_json() returned: what each process did and when, which processes "
    "waited for which, and the critical path."
)
EPILOG = """examples:
  in the job, on process 0:  pathlib.Path("restore.json").write_text(orbax_ext.last_report().to_json())
  orbax-ext report restore.json    prints a table
  orbax-ext report restore.json --html restore.html --trace restore.trace.json

The page opens in any browser, without a network. The trace opens in https://ui.perfetto.dev and chrome://tracing.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=pathlib.Path, help="a report as JSON")
    parser.add_argument("--html", metavar="OUT", type=pathlib.Path, help="write the timeline as a page")
    parser.add_argument("--trace", metavar="OUT", type=pathlib.Path, help="write the timeline as a Perfetto trace")
    parser.add_argument("--json", action="store_true", help="print the analysis as JSON")


def run(args: argparse.Namespace) -> bool:
    report = files.load(args.file, RestoreReport.from_json)
    if args.html:
        files.write(args.html, page.render(report))
    if args.trace:
        files.write(args.trace, json.dumps(timeline.trace_events(report)))
    if args.json:
        print(json.dumps(_analysis(report), indent=2))
    else:
        written = [f"written: {path}" for path in (args.html, args.trace) if path]
        print("\n".join([str(report), *_lines(report), *written]))
    return not report.error


def _analysis(report: RestoreReport) -> dict[str, Any]:
    lanes = timeline.make_lanes(report)
    path = timeline.critical_path(lanes)
    return {
        "error": report.error,
        "processes": report.processes,
        "leaves": report.leaves,
        "groups": report.groups,
        "critical_path": [{"process": step.process, **lanes[step.process][step.span].to_dict()} for step in path],
        "waited_for": [
            {"process": blame.process, "seconds": blame.seconds, "by": blame.waiters}
            for blame in timeline.most_waited_for(lanes)
        ],
        "members": [
            {key: value for key, value in member.to_dict().items() if key != "spans"}
            for member in report.members.values()
        ],
    }


def _lines(report: RestoreReport) -> list[str]:
    """Returns the largest parts of the critical path, and the processes that cost the others the most waiting."""
    lanes = timeline.make_lanes(report)
    hosts = {process: member.host for process, member in report.members.items()}
    seconds: dict[tuple[str, int], float] = {}
    for step in timeline.critical_path(lanes):
        key = (lanes[step.process][step.span].phase, step.process)
        seconds[key] = seconds.get(key, 0.0) + step.end - step.start
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:5]
    parts = [
        f"{phase} on {text_lib.process(process, hosts)} {text_lib.seconds(taken)}"
        for (phase, process), taken in largest
    ]
    waits = [
        f"{text_lib.process(blame.process, hosts)} by {text_lib.count(blame.waiters, 'process')} "
        f"({text_lib.seconds(blame.seconds)} in all)"
        for blame in timeline.most_waited_for(lanes)[:3]
    ]
    critical_path = f"critical path: {', '.join(parts)}"
    return [critical_path, f"waited for: {', '.join(waits)}"] if waits else [critical_path]
