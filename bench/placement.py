"""Measures the peak memory of a replicated `jax.device_put` and of `orbax_ext.replicate`.

python -m bench.placement [--write]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bench.memory import peak_growth
from orbax_ext import lab
from tools import markdown

PAGE = markdown.Page(
    "bench/results/placement.md",
    "Memory to replicate a host array, measured",
    """A host array goes, replicated, to one device of each process. The figures are how far a process's resident memory
    rises at its peak, on the process where it rises most.""",
    "make bench-placement",
)
MB = 1 << 20


def measure(function: str, megabytes: int) -> int:
    """Returns the bytes by which this process's memory rose. Runs on every process."""
    import jax
    import numpy as np

    import orbax_ext

    devices = [next(d for d in jax.devices() if d.process_index == rank) for rank in range(jax.process_count())]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(array: np.ndarray[Any, Any]) -> Any:
        if function == "device_put":
            return jax.block_until_ready(jax.device_put(array, sharding))
        return jax.block_until_ready(orbax_ext.replicate(array, mesh))

    put(np.zeros(8, np.float32))  # the first call sets up things that stay; they are not part of the array's cost
    table = np.full((megabytes, MB // 4), 1.0, np.float32)
    return peak_growth(lambda: put(table))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="size of the array (64)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of processes")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    rows = []
    for processes in args.processes:
        with lab.Cluster(processes, timeout=300) as cluster:
            growth = [max(cluster.run(measure, function, args.megabytes)) for function in ("device_put", "replicate")]
        rows.append((processes, *(f"+{rise / MB:.0f} MB" for rise in growth)))
        print(markdown.row(rows[-1]), flush=True)
    if args.write:
        head = ("processes", f"`jax.device_put` of {args.megabytes} MB", "`orbax_ext.replicate`")
        PAGE.write(markdown.table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
