"""Do all processes want the same? Worked out from what each brought to the first meeting, the same on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from orbax_ext import errors

_MOST = 8  # processes that a line names


def differing(wanted: Mapping[int, Mapping[str, str]]) -> list[str]:
    """The names of what is not the same on all processes."""
    names = sorted({name for each in wanted.values() for name in each})
    return [name for name in names if len({each.get(name) for each in wanted.values()}) > 1]


def check(
    wanted: Mapping[int, Mapping[str, str]],
    hosts: Mapping[int, str],
    details: Mapping[int, Sequence[str]] | None = None,
) -> None:
    """Raises `PlanMismatchError` unless all want the same; says what differs on which process.

    `details` has what is known of how a process's tree differs from that of process 0.
    """
    if names := differing(wanted):
        lines = [
            _line(name, {process: each.get(name, "") for process, each in wanted.items()}, hosts) for name in names
        ]
        lines += _detail_lines(details or {}, hosts)
        raise errors.PlanMismatchError(
            "the processes do not agree on what to restore:\n  " + "\n  ".join(lines),
            {process: "; ".join(f"{name}: {each.get(name)}" for name in names) for process, each in wanted.items()},
        )


def _detail_lines(details: Mapping[int, Sequence[str]], hosts: Mapping[int, str]) -> list[str]:
    """One line for each different way to differ, with the processes that share it."""
    alike: dict[str, list[int]] = {}
    for process, found in details.items():
        if found:
            alike.setdefault("; ".join(found), []).append(process)
    lines = []
    for text, processes in list(alike.items())[:_MOST]:
        named = ", ".join(f"{process} ({hosts[process]})" for process in processes[:_MOST])
        lines.append(f"process {named}{' and others' if len(processes) > _MOST else ''} against process 0: {text}")
    return lines


def _line(name: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    usual = Counter(values.values()).most_common(1)[0][0]
    odd = [process for process, value in values.items() if value != usual]
    shown = ", ".join(f"process {process} ({hosts[process]}) has {values[process]}" for process in odd[:_MOST])
    return f"{name}: most have {usual}, but {shown}" + (" and others" if len(odd) > _MOST else "")
