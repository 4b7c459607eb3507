"""Runs `probes` in a process with two CPU devices, one per replica.

So the caller's devices, mesh and registered handlers do not matter, and `orbax-ext doctor` starts without JAX.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

RESULT = "orbax_ext.upstream.probes: "  # begins the line that the process prints


def run(names: list[str], limit: float = 240.0) -> dict[str, bool | str]:
    """Returns for each named probe whether it found its defect, or the reason why it could not tell."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    env.pop("XLA_FLAGS", None)  # may set another number of devices
    command = [sys.executable, "-m", "orbax_ext.upstream.probes", *names]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(names, f"no answer within {limit:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            results: dict[str, bool | str] = json.loads(line.removeprefix(RESULT))
            return results
    reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return dict.fromkeys(names, f"the probing process ended with {done.returncode}: {reason}")
