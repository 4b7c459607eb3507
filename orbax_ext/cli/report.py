"""`orbax-ext report`: the timeline of a restore, as a page, as a trace, or in words."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from orbax_ext.cli import exits
from orbax_ext.report import page, timeline
from orbax_ext.report.report import RestoreReport

_EPILOG = """examples:
  in the job, on process 0:  pathlib.Path("restore.json").write_text(orbax_ext.last_report().to_json())
  orbax-ext report restore.json                                      a table, in words
  orbax-ext report restore.json --html restore.html --trace restore.trace.json

The page opens in any browser, without a network. The trace opens in https://ui.perfetto.dev and chrome://tracing.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a report that last_report().to_json() has written: who did what when, who waited for whom, "
        "and the critical path."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", type=pathlib.Path, help="the JSON of a report")
    parser.add_argument("--html", metavar="OUT", type=pathlib.Path, help="write a timeline as a page")
    parser.add_argument("--trace", metavar="OUT", type=pathlib.Path, help="write a timeline as a Chrome/Perfetto trace")
    parser.add_argument("--json", action="store_true", help="print the analysis as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = _load(args.file)
    if args.html:
        _write(args.html, page.render(report))
    if args.trace:
        _write(args.trace, json.dumps(timeline.trace_events(report)))
    if args.json:
        print(json.dumps(_analysis(report), indent=2))
    else:
        print(report)
        print("\n".join(_lines(report)))
        print("\n".join(f"written: {path}" for path in (args.html, args.trace) if path), end="")
    return exits.EXIT_BAD_VERDICT if report.error else exits.EXIT_OK


def _load(path: pathlib.Path) -> RestoreReport:
    try:
        return RestoreReport.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise exits.UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise exits.UserError(f"{path}: {error}") from None


def _write(path: pathlib.Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise exits.UserError(f"{path}: {error.strerror or error}") from None


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
            {"process": wait.process, "seconds": wait.seconds, "by": wait.waiters}
            for wait in timeline.most_waited_for(lanes)
        ],
        "members": [
            {key: value for key, value in member.to_dict().items() if key != "spans"}
            for member in report.members.values()
        ],
    }


def _lines(report: RestoreReport) -> list[str]:
    lanes = timeline.make_lanes(report)
    on_path: dict[tuple[str, int], float] = {}
    for step in timeline.critical_path(lanes):
        key = (lanes[step.process][step.span].phase, step.process)
        on_path[key] = on_path.get(key, 0.0) + step.end - step.start
    most = sorted(on_path.items(), key=lambda item: -item[1])[:5]
    lines = ["critical path: " + ", ".join(f"{phase} on process {p} {s:.2f} s" for (phase, p), s in most)]
    waits = [f"process {w.process} by {w.waiters} ({w.seconds:.2f} s in all)" for w in timeline.most_waited_for(lanes)]
    if waits:
        lines.append("waited for: " + ", ".join(waits[:3]))
    return lines
