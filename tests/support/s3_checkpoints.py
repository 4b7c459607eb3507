"""A small state, saved to a path with plain Orbax, restored and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import orbax.checkpoint as ocp

STATE = {"weights": np.arange(4096, dtype=np.int32), "bias": np.ones((3,), np.float32), "step": 7}


def save(path: str, *steps: int, **options: Any) -> None:
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.PyTreeSave(STATE))
        manager.wait_until_finished()


def restore(path: str, step: int | None = None) -> dict[str, Any]:
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        return manager.restore(manager.latest_step() if step is None else step, args=ocp.args.PyTreeRestore())


def check(restored: dict[str, Any]) -> None:
    """Asserts that a restored state is `STATE`, bit for bit."""
    assert restored["step"] == STATE["step"]
    for name in ("weights", "bias"):
        assert np.asarray(restored[name]).tobytes() == np.asarray(STATE[name]).tobytes()
