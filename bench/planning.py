"""Measures how long a process takes to plan the restore of a very large state, and how much memory it needs.

python -m bench.planning [--write]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from bench import memory
from orbax_ext.options import Options
from orbax_ext.plan import Bundle, LaneBatch, Pack, RestorePlan, digest
from orbax_ext.plan.boundary import bytes_of_groups
from orbax_ext.plan.forecast import described, forecast
from orbax_ext.plan.planner import make_plan
from tools import markdown

PAGE = markdown.Page(
    "bench/results/planning.md",
    "Planning a large restore, measured",
    """What a process computes by itself before the first meeting, and the choice of a strategy after it, for a mixture
    of experts with 671 billion parameters. Programs are what is compiled; groups of the same make-up share one.""",
    "make bench-plan",
)
DEVICES = 8  # of a process
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    model = described.parse_shapes(MODEL)
    print(f"{len(model):,} leaves", flush=True)
    rows = []
    for replicas in (2, 8, 64):
        rows.append(_row(model, replicas))
        print(markdown.row(rows[-1]), flush=True)
    if args.write:
        PAGE.write(markdown.table(("processes", "mesh", "leaves", "groups", "programs", "seconds", "memory"), rows))
    return 0


def _row(model: list[described.Described], replicas: int) -> tuple[str, ...]:
    """Plans on one mesh, counts the bytes of each group, and returns what that took."""
    sizes = (("dp", replicas), ("fsdp", 64), ("tp", 8))
    processes = replicas * 64
    mesh = forecast.mesh_on(sizes, processes)
    leaves, _ = described.place(model, mesh, [])
    seconds: list[float] = []
    plans: list[RestorePlan] = []

    def plan() -> None:
        started = time.monotonic()
        made = make_plan(leaves, [mesh], Options(strategy="spread"), processes=processes, group_bytes=GROUP_BYTES)
        bytes_of_groups(made, [mesh], processes)
        plans.append(made)
        digest([leaves, [mesh]])
        seconds.append(time.monotonic() - started)

    growth = memory.peak_growth(plan)
    (chosen,) = plans
    programs = {tuple(_operation(bundle, chosen) for bundle in group.bundles) for group in chosen.groups}
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes)
    return (
        f"{processes:,} x {DEVICES}",
        axes,
        f"{len(leaves):,}",
        f"{len(chosen.groups):,}",
        str(len(programs)),
        f"{seconds[0]:.1f}",
        f"{growth / 1e6:.0f} MB",
    )


def _operation(bundle: Bundle, plan: RestorePlan) -> tuple[object, ...]:
    """Returns what a compiled program depends on; bundles with equal operations share a program."""
    if isinstance(bundle, Pack):
        return (bundle.words, bundle.summed)
    leaf = plan.leaves[bundle.leaves[0]]
    return (leaf.block, leaf.dtype, bundle.splits if isinstance(bundle, LaneBatch) else "sum")


if __name__ == "__main__":
    sys.exit(main())
