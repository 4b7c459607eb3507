"""How long every process needs to plan the restore of a very large state, and how much memory. Writes BUILD.md's table.

python -m bench.planning
"""

from __future__ import annotations

import sys
import time

from bench import memory
from orbax_ext.options import Options
from orbax_ext.plan import Bundle, LaneBatch, Pack, Rates, RestorePlan, digest, with_cheapest
from orbax_ext.plan.forecast import described, forecast
from orbax_ext.plan.planner import make_plan
from tools import docs, releases

DEVICES = 8  # a process
GROUP_BYTES = 64 << 20
# A mixture of experts with 671 billion parameters, four experts to a leaf, as 64 replicas save it together.
MODEL = """
embed                              bfloat16  129280x7168    P(fsdp,tp)       2020x14
head                               bfloat16  7168x129280    P(fsdp,tp)       7x4040
norm.{0..243}                      float32   7168
layers.{0..60}.q_a                 bfloat16  7168x1536      P(fsdp,tp)       7x48
layers.{0..60}.q_b                 bfloat16  1536x24576     P(fsdp,tp)       24x48
layers.{0..60}.kv_a                bfloat16  7168x576       P(fsdp,tp)       7x18
layers.{0..60}.kv_b                bfloat16  512x32768      P(fsdp,tp)       8x64
layers.{0..60}.out                 bfloat16  16384x7168     P(fsdp,tp)       4x896
dense.{0..5}.up                    bfloat16  7168x18432     P(fsdp,tp)       112x36
dense.{0..2}.down                  bfloat16  18432x7168     P(fsdp,tp)       288x14
router.{0..57}                     float32   7168x256       P(fsdp,tp)       7x8
shared.{0..173}                    bfloat16  7168x2048      P(fsdp,tp)       112x4
experts.{0..11135}                 bfloat16  4x7168x2048    P(None,fsdp,tp)  4x112x4
"""


def main() -> int:
    model = described.parse_shapes(MODEL)
    print(f"{len(model):,} leaves", flush=True)
    rows = ["| processes | mesh | leaves | groups | programs | seconds | memory |", "|---" * 7 + "|"]
    for replicas in (2, 8, 64):
        rows.append(_row(model, replicas))
        print(rows[-1], flush=True)
    docs.update(releases.ROOT / "BUILD.md", "planner", "\n".join(rows))
    return 0


def _row(model: list[described.Described], replicas: int) -> str:
    """What a process does before the first meeting and the choice after it, on one mesh."""
    sizes = (("dp", replicas), ("fsdp", 64), ("tp", 8))
    processes = replicas * 64
    mesh = forecast.mesh_on(sizes, processes)
    leaves, _ = described.place(model, mesh, [])
    seconds: list[float] = []
    plans: list[RestorePlan] = []

    def plan() -> None:
        started = time.monotonic()
        made = make_plan(leaves, [mesh], Options(strategy="spread"), processes=processes, group_bytes=GROUP_BYTES)
        plans.append(with_cheapest(made, [mesh], processes, Rates(1.25e9, 25e9)))
        digest([leaves, [mesh]])
        seconds.append(time.monotonic() - started)

    grown = memory.peak_growth(plan)
    (chosen,) = plans
    programs = {tuple(_operation(bundle, chosen) for bundle in group.bundles) for group in chosen.groups}
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes)
    return (
        f"| {processes:,} x {DEVICES} | {axes} | {len(leaves):,} | {len(chosen.groups):,} | {len(programs)} | "
        f"{seconds[0]:.1f} | {grown / 1e6:.0f} MB |"
    )


def _operation(bundle: Bundle, plan: RestorePlan) -> tuple[object, ...]:
    """What a program knows of a bundle; bundles that are alike in it share one."""
    if isinstance(bundle, Pack):
        return (bundle.words, bundle.summed)
    leaf = plan.leaves[bundle.leaves[0]]
    return (leaf.block, leaf.dtype, bundle.splits if isinstance(bundle, LaneBatch) else "sum")


if __name__ == "__main__":
    sys.exit(main())
