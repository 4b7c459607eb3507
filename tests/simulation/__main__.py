"""Runs many seeds on all cores, or one seed again with its trace.

python -m tests.simulation --seeds 100000 [--first 40000]
python -m tests.simulation --seed 17
python -m tests.simulation --recorded 37
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from concurrent import futures

from tests.simulation import plans, runs, track_record

_CHUNK = 100  # seeds
_MOST_LINES = 400  # of a trace


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3000, help="how many, from 0 on (3000)")
    parser.add_argument("--first", type=int, default=0, help="without those before this one, which ran earlier")
    parser.add_argument("--seed", type=int, help="only this one, with its trace")
    parser.add_argument("--recorded", choices=track_record.load(), metavar="SEED", help="one of the track record")
    args = parser.parse_args(argv)
    if args.seed is not None or args.recorded is not None:
        plan = plans.random_plan(args.seed) if args.recorded is None else track_record.load()[args.recorded]
        ended = runs.run(plan, tracing=True)
        _show(ended)
        if ended.problems:
            _show_smallest(ended.plan)
        return bool(ended.problems)
    failed = _run_all(range(args.first, args.seeds))
    for seed in failed[:3]:
        _show_smallest(plans.random_plan(seed))
    print(f"seeds {args.first:,} to {args.seeds:,}, failed: {', '.join(map(str, failed)) or 'none'}")
    return bool(failed)


def _run_all(seeds: range) -> list[int]:
    """Returns the seeds that fail."""
    began, done = time.monotonic(), 0
    failed: list[int] = []
    gc.freeze()  # JAX's objects stay
    gc.disable()  # a run leaves few objects, but makes many: looking at them takes a fifth of its time
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    with futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for chunk, found in zip(chunks, pool.map(_failing, chunks), strict=True):
            done += len(chunk)
            failed += found
            seconds = time.monotonic() - began
            print(
                f"\rseed {seeds.start + done:,} of {seeds.stop:,}, {seconds:.0f} s, failed: {failed or 0}",
                end="",
                flush=True,
            )
    print()
    return failed


def _failing(seeds: range) -> list[int]:
    failed = [ended.plan.seed for ended in runs.failing(seeds)]
    gc.collect()
    return failed


def _show_smallest(plan: plans.Plan) -> None:
    smallest = runs.shrink(plan)
    print(f"\nseed {plan.seed}, with the fewest faults and processes that still fail:")
    _show(smallest)


def _show(ended: runs.Run) -> None:
    print("\n".join(ended.trace[-_MOST_LINES:]))
    print(ended.plan)
    print("\n".join(ended.problems) or "nothing is wrong")
    print(f"For the track record:\n{track_record.line(ended.plan)}")
    print(f"Run it again: make simulate SEED={ended.plan.seed}\n")


if __name__ == "__main__":
    sys.exit(main())
