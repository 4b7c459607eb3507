"""The seconds that the cost model expects of restores on 64 to 4,096 hosts: python -m bench.cost_model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, Rates
from orbax_ext.plan.cost import seconds
from orbax_ext.plan.planner import make_plan
from orbax_ext.plan.volumes import Load, Loads
from tools import markdown

PAGE = markdown.Page(
    "bench/results/cost_model.md",
    "Restores of large jobs, as the cost model expects them",
    """A state of 687 billion bfloat16 elements (1.37 TB) in 640 leaves, sharded over 8 hosts with 8 devices each, with
    as many replicas as the hosts allow. Storage gives 10 Gbit/s to a host and 400 Gbit/s in all, the fabric 200
    Gbit/s to a host. All replicas saved the checkpoint together, so that chunks can be shared out. Not modelled: slow
    processes, requests that storage throttles, and collectives that slow down with the number of hosts.""",
    "make docs",
)
DEVICES = 8  # of a host
HOSTS_OF_A_REPLICA = 8
LAYERS = 640
_LEAF = (16384, 65536)  # 1.07 billion elements: 640 of them make 687 billion
_RATES = Rates(storage=10e9 / 8, fabric=200e9 / 8, storage_total=400e9 / 8)
_GROUP_BYTES = 64 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cost_model", description=(__doc__ or "").splitlines()[0])
    parser.parse_args(argv)
    print(table())
    return 0


def table() -> str:
    """Returns a Markdown table with a row for each number of hosts and strategy."""
    head = ("hosts", "replicas", "strategy", "a host reads", "all read", "a host receives", "seconds")
    rows = [
        (
            hosts,
            hosts // HOSTS_OF_A_REPLICA,
            strategy,
            f"{load.read / 1e9:,.1f} GB",
            f"{load.read_by_all / 1e12:,.1f} TB",
            f"{load.link / 1e9:,.1f} GB",
            f"{seconds(load, _RATES):,.0f}",
        )
        for hosts in (64, 512, 4096)
        for strategy, load in loads(hosts).items()
    ]
    return markdown.table(head, rows)


def loads(hosts: int) -> dict[str, Load]:
    """Returns the bytes that each strategy moves over the links of the hosts."""
    replicas, inside = hosts // HOSTS_OF_A_REPLICA, HOSTS_OF_A_REPLICA * DEVICES
    owners = tuple(device // DEVICES for device in range(hosts * DEVICES))
    mesh = MeshInfo(("dp", "fsdp"), (replicas, inside), owners)
    block = (_LEAF[0] // inside, _LEAF[1])
    chunk = (block[0], block[1] // replicas)  # as all replicas save it together
    leaf = Leaf("w", _LEAF, "bfloat16", 2, block, 0, (("fsdp",), ()), chunk, divisible=True)
    leaves = [leaf] * LAYERS
    loads = {"`direct` (plain Orbax)": Loads(leaves, [mesh], hosts).direct(range(LAYERS))}
    for strategy in ("single", "spread"):
        options = Options(strategy=strategy, replica_axis="dp" if strategy == "single" else None)
        plan = make_plan(leaves, [mesh], options, processes=hosts, group_bytes=_GROUP_BYTES)
        loads[f"`{strategy}`"] = Loads(plan.leaves, [mesh], hosts).travelling(plan.groups)
    return loads


if __name__ == "__main__":
    sys.exit(main())
