"""Do all processes want the same? Worked out from what each brought to the first meeting, the same on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from orbax_ext import errors

_MOST = 8  # processes that a line names


def check(wanted: Mapping[int, Mapping[str, str]], hosts: Mapping[int, str]) -> None:
    """Raises `PlanMismatchError` unless all want the same; says what differs on which process."""
    names = sorted({name for each in wanted.values() for name in each})
    differing = [name for name in names if len({each.get(name) for each in wanted.values()}) > 1]
    if differing:
        lines = [
            _line(name, {process: each.get(name, "") for process, each in wanted.items()}, hosts) for name in differing
        ]
        raise errors.PlanMismatchError(
            "the processes do not agree on what to restore:\n  " + "\n  ".join(lines),
            {process: "; ".join(f"{name}: {each.get(name)}" for name in differing) for process, each in wanted.items()},
        )


def _line(name: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    usual = Counter(values.values()).most_common(1)[0][0]
    odd = [process for process, value in values.items() if value != usual]
    shown = ", ".join(f"process {process} ({hosts[process]}) has {values[process]}" for process in odd[:_MOST])
    return f"{name}: most have {usual}, but {shown}" + (" and others" if len(odd) > _MOST else "")
