"""Peak memory of a replicated `jax.device_put` beside `orbax_ext.replicate`: `python -m orbax_ext.lab.bench_placement`.

A host array goes to one device of each process. What is measured is how far a process's resident memory rises above
what it was, at its peak, on the process where it rises most.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.memory import peak_growth
from orbax_ext import lab

MB = 1 << 20


def measure(way: str, megabytes: int) -> int:
    """Bytes by which this process's memory rose. Runs on every process."""
    import jax
    import numpy as np

    import orbax_ext

    devices = [next(d for d in jax.devices() if d.process_index == rank) for rank in range(jax.process_count())]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(array: np.ndarray[Any, Any]) -> Any:
        if way == "device_put":
            return jax.block_until_ready(jax.device_put(array, sharding))
        return jax.block_until_ready(orbax_ext.replicate(array, mesh))

    put(np.zeros(8, np.float32))  # what the first call sets up for good is not the array's cost
    table = np.full((megabytes, MB // 4), 1.0, np.float32)
    return peak_growth(lambda: put(table))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args(argv)
    print(f"| processes | `jax.device_put` of {args.megabytes} MB | `orbax_ext.replicate` |")
    print("|---|---|---|")
    for processes in args.processes:
        with lab.Cluster(processes, timeout=300) as cluster:
            growth = {way: max(cluster.run(measure, way, args.megabytes)) for way in ("device_put", "replicate")}
        print(f"| {processes} | +{growth['device_put'] / MB:.0f} MB | +{growth['replicate'] / MB:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
