"""The plans that once failed, as plain data: when the draws change, the same seed makes another plan."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

from tests.simulation.plans import Fault, Plan

_FILE = pathlib.Path(__file__).with_name("track_record.json")


def load() -> dict[str, Plan]:
    """Returns the plans that once failed, by seed."""
    return {seed: from_json(content) for seed, content in json.loads(_FILE.read_text()).items()}


def line(plan: Plan) -> str:
    """Returns the line of a plan in the file."""
    return f'  "{plan.seed}": {json.dumps(to_json(plan))}'


def to_json(plan: Plan) -> dict[str, Any]:
    faults = [list(dataclasses.astuple(fault)) for fault in plan.faults]
    late = None if math.isinf(plan.late) else plan.late  # JSON has no infinity
    return {**dataclasses.asdict(plan), "faults": faults, "late": late}


def from_json(content: dict[str, Any]) -> Plan:
    """Returns the plan that `to_json` was given."""
    faults = tuple(Fault(*fault) for fault in content["faults"])
    late = math.inf if content["late"] is None else content["late"]
    return Plan(**{**content, "faults": faults, "late": late})
