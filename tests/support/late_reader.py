"""A restore whose reader is late. Run on the processes."""

from __future__ import annotations

import math

from tests.support import fault_injection, states
from tests.support.states import MeshSpec

# The two processes of each exchange have no communicator yet when the restore begins.
MESH = MeshSpec((1, 2, 8), ("pp", "dp", "tp"))
LATE = 45.0  # seconds; opening a Gloo communicator times out after 30


def restore(path: str, implementation: str) -> list[str]:
    knobs = states.knobs_for(implementation, MESH, "dp")
    if implementation == "ours":
        knobs["late_seconds"] = math.inf  # the reader is waited for
    with fault_injection.on(0, lambda: fault_injection.slow_reads(LATE)):
        return states.restore(path, states.STATE, MESH, implementation=implementation, knobs=knobs)
