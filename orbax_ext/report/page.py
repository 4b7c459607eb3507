"""The timeline of a report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import datetime
import importlib.resources
import json
from typing import Any

from orbax_ext.report import timeline
from orbax_ext.report.report import ProcessReport, RestoreReport
from orbax_ext.report.spans import Span
from orbax_ext.report.tables import columns, shown
from orbax_ext.text import size

_KINDS = {"read": "read", "exchange": "exchange", "wait": "wait", "compile": "compile", "connect": "compile"}
_MOST_BLAMES = 40
_MOST_NAMES = 4  # leaves named for each way of travelling


def render(report: RestoreReport) -> str:
    """The page's text."""
    template = importlib.resources.files("orbax_ext.report").joinpath("timeline.html").read_text(encoding="utf-8")
    # What comes from elsewhere, such as names of hosts, must not end the element that it stands in.
    text = json.dumps(page_data(report), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", text)


def page_data(report: RestoreReport) -> dict[str, Any]:
    """What the page shows, as plain data."""
    lanes = timeline.lanes(report)
    numbers = {process: number for number, process in enumerate(lanes)}
    total = max((span.end for spans in lanes.values() for span in spans), default=0.0)
    blames = timeline.blames(lanes)
    costs = {blame.process: blame.seconds for blame in blames}
    titles = columns(list(report.members.values()))
    verdict = "Failed restore" if report.error else "Restore"
    return {
        "title": f"{verdict} of {report.leaves} leaves on {_processes(report)}: {total:.2f} s",
        "when": _when(min(member.started for member in report.members.values())),
        "error": report.error[:2000],
        "figures": _figures(report, total),
        "total": total,
        "lanes": [
            _lane(report.members[process], spans, costs.get(process, 0.0), titles) for process, spans in lanes.items()
        ],
        "path": [
            {"lane": numbers[step.process], "span": step.span, "start": step.start, "end": step.end}
            for step in timeline.critical_path(lanes)
        ],
        "blames": [
            {"process": blame.process, "seconds": blame.seconds, "waiters": blame.waiters}
            for blame in blames[:_MOST_BLAMES]
        ],
        "ways": _ways(report),
        "columns": ["process", *titles],
    }


def _lane(member: ProcessReport, spans: tuple[Span, ...], blame: float, titles: Any) -> dict[str, Any]:
    cells = {title: shown(value, member) for title, value in titles.items()}
    return {
        "process": member.process,
        "host": member.host,
        "spans": [_box(span) for span in spans],
        "read": member.seconds.get("read", 0.0),
        "wait": member.seconds.get("wait", 0.0),
        "blame": blame,
        "figures": list(cells.items()),
        "cells": [str(member.process), *cells.values()],
    }


def _box(span: Span) -> dict[str, Any]:
    title = span.phase if span.group is None else f"{span.phase} group {span.group + 1}"
    box: dict[str, Any] = {
        "kind": _KINDS.get(span.phase, "other"),
        "phase": span.phase,
        "title": f"{title}, at {span.note}" if span.note else title,
        "start": round(span.start, 6),
        "end": round(span.end, 6),
    }
    if span.bytes:
        box["bytes"] = span.bytes
    if span.waited_for is not None:
        box["last"] = span.waited_for
    return box


def _figures(report: RestoreReport, total: float) -> list[tuple[str, str]]:
    members = report.members.values()
    read = sum(member.bytes_read for member in members)
    found = [
        ("read from storage", size(read)),
        ("exchanged", size(sum(member.bytes_received for member in members))),
        ("rate in all", f"{size(read / total)}/s" if total else "?"),
        ("requests", str(sum(member.requests for member in members))),
        ("groups", str(report.groups)),
        ("peak memory of a host process", size(max(member.host_peak_bytes for member in members))),
    ]
    if report.missing:
        found.append(("no word from", f"{len(report.missing)} processes"))
    return found


def _ways(report: RestoreReport) -> list[tuple[str, str, str]]:
    by_way: dict[str, list[str]] = {}
    for name, how in report.strategy.items():
        by_way.setdefault(how, []).append(name)
    return [
        (str(len(names)), how, ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else ""))
        for how, names in sorted(by_way.items(), key=lambda item: -len(item[1]))
    ]


def _processes(report: RestoreReport) -> str:
    if len(report.members) == 1 and report.processes > 1:
        return f"process {report.process} of {report.processes}"
    return f"{report.processes} process{'es' if report.processes > 1 else ''}"


def _when(started: float) -> str:
    return datetime.datetime.fromtimestamp(started, datetime.UTC).strftime("began %Y-%m-%d %H:%M:%S UTC")
