"""What the benchmark compares: Orbax's own handlers, and the strategies of orbax_ext."""

from __future__ import annotations

PLAIN = "plain"  # Orbax's ArrayHandler: every process reads what it needs
STOCK = "stock"  # Orbax's SingleReplicaArrayHandler
STOCK_OLDEST = "stock 0.11.33"  # the same of the oldest supported release
SINGLE_REPLICA = (STOCK, STOCK_OLDEST)
BASELINES = (PLAIN, *SINGLE_REPLICA)
STRATEGIES = (*BASELINES, "single", "spread", "auto")
