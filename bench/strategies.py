"""What the benchmark compares: Orbax's own handlers, and the strategies of orbax_ext."""

from __future__ import annotations

PLAIN = "plain"  # Orbax's ArrayHandler: every process reads what it needs
STOCK = "stock"  # Orbax's SingleReplicaArrayHandler
STOCK_OLDEST = "stock 0.11.33"  # the same of the oldest supported release
SINGLE_REPLICA = (STOCK, STOCK_OLDEST)
BASELINES = (PLAIN, *SINGLE_REPLICA)
SINGLE = "single"
SPREAD = "spread"
AUTO = "auto"
VERIFIED = "auto, verify"  # with verify=True, and digests beside the checkpoint
BEFORE = "auto before"  # the code of another checkout (--before)
STRATEGIES = (*BASELINES, SINGLE, SPREAD, AUTO, VERIFIED, BEFORE)
USUAL = (PLAIN, STOCK, SINGLE, SPREAD, AUTO)
OTHER_CODE = (*BASELINES, BEFORE)  # whose results do not depend on the commit


def strategy_of(name: str) -> str:
    """Returns the value of the knob `strategy` for one of our rows."""
    return AUTO if name in (VERIFIED, BEFORE) else name
