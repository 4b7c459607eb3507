"""The timeline of a report as one HTML page that needs no network and no other file. Pure."""

from __future__ import annotations

import datetime
import importlib.resources
import json
from typing import Any

from orbax_ext import text as text_lib
from orbax_ext.report import timeline
from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.report import RestoreReport
from orbax_ext.report.spans import Span
from orbax_ext.report.tables import ProcessTable, names_by_value

_KINDS = {
    "read": "read",
    "read directly": "direct",
    "exchange": "exchange",
    "wait": "wait",
    "compile": "compile",
    "connect": "compile",
}
_MOST_WAITED_FOR = 40  # rows of the table of processes that others waited for
_MOST_TAKE_OVERS = 40  # rows of the table of take-overs
_MOST_NAMES = 4  # leaves that are named for each strategy
_MOST_ERROR = 2000  # characters of an error message


def render(report: RestoreReport) -> str:
    """Returns the page's HTML."""
    template = importlib.resources.files("orbax_ext.report").joinpath("timeline.html").read_text(encoding="utf-8")
    # Text from elsewhere, such as the name of a host, must not end the element in which it stands.
    text = json.dumps(page_data(report), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("__DATA__", text)


def page_data(report: RestoreReport) -> dict[str, Any]:
    """Returns everything that the page shows, as plain data."""
    lanes = timeline.make_lanes(report)
    numbers = {process: number for number, process in enumerate(lanes)}
    total = max((span.end for spans in lanes.values() for span in spans), default=0.0)
    waits = timeline.most_waited_for(lanes)
    waited_for = {wait.process: wait.seconds for wait in waits}
    table = ProcessTable(report.members.values())
    started = min(member.started for member in report.members.values())
    outcome = "Failed restore" if report.error else "Restore"
    return {
        "title": f"{outcome} of {text_lib.count(report.leaves, 'leaf')} on {report.scope}: {text_lib.seconds(total)}",
        "when": f"began {datetime.datetime.fromtimestamp(started, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "error": report.error[:_MOST_ERROR],
        "figures": _figures(report, total),
        "total": total,
        "lanes": [
            _lane(report.members[process], spans, waited_for.get(process, 0.0), table)
            for process, spans in lanes.items()
        ],
        "path": [
            {"lane": numbers[step.process], "span": step.span, "start": step.start, "end": step.end}
            for step in timeline.critical_path(lanes)
        ],
        "waited_for": [
            {"process": wait.process, "seconds": wait.seconds, "waiters": text_lib.count(wait.waiters, "process")}
            for wait in waits[:_MOST_WAITED_FOR]
        ],
        "take_overs": _take_overs(report),
        "strategies": _strategies(report),
        "columns": table.head,
    }


def _lane(member: ProcessReport, spans: tuple[Span, ...], waited_for: float, table: ProcessTable) -> dict[str, Any]:
    return {
        "process": member.process,
        "name": text_lib.process(member.process, {member.process: member.host} if member.host else {}),
        "host": member.host,
        "spans": [_box(span) for span in spans],
        "read": member.seconds.get("read", 0.0) + member.seconds.get("read directly", 0.0),
        "wait": member.seconds.get("wait", 0.0),
        "waited_for": waited_for,
        "cells": table.row(member),
    }


def _box(span: Span) -> dict[str, Any]:
    box: dict[str, Any] = {
        "kind": _KINDS.get(span.phase, "other"),
        "phase": span.phase,
        "title": _title(span),
        "start": round(span.start, 6),
        "end": round(span.end, 6),
    }
    if span.bytes:
        box["bytes"] = span.bytes
    if span.waited_for is not None:
        box["last"] = span.waited_for
    if span.note and span.phase != "wait":
        box["taken_over"] = True
    return box


def _title(span: Span) -> str:
    if not span.note:
        return span.title
    return f"{span.title}, at {span.note}" if span.phase == "wait" else f"{span.title}, {span.note}"


def _figures(report: RestoreReport, total: float) -> list[tuple[str, str]]:
    members = report.members.values()
    read = sum(member.bytes_read for member in members)
    figures = [
        ("read from storage", text_lib.size(read)),
        ("exchanged", text_lib.size(sum(member.bytes_received for member in members))),
        ("total read rate", f"{text_lib.size(read / total)}/s" if total else "?"),
        ("requests", str(sum(member.requests for member in members))),
        ("groups", str(report.groups)),
        ("largest peak memory of a process", text_lib.size(max(member.host_peak_bytes for member in members))),
    ]
    if report.missing:
        figures.append(("no report from", text_lib.count(len(report.missing), "process")))
    return figures


def _take_overs(report: RestoreReport) -> list[tuple[str, str, str]]:
    """Returns a row for each take-over: the group, in place of whom others have read it, and why."""
    rows = [
        (f"group {one.group + 1}", text_lib.process(one.process, {one.process: one.host}), one.why)
        for one in report.take_overs[:_MOST_TAKE_OVERS]
    ]
    if more := len(report.take_overs) - len(rows):
        rows.append((f"and {more} more", "", ""))
    return rows


def _strategies(report: RestoreReport) -> list[tuple[str, str, str]]:
    """Returns a row for each strategy: how many leaves, the strategy and why, some names."""
    by_strategy = sorted(names_by_value(report.strategy).items(), key=lambda item: -len(item[1]))
    return [(str(len(names)), strategy, text_lib.listing(names, _MOST_NAMES)) for strategy, names in by_strategy]
