"""BUILD.md's tables of speed: what the benchmark measured, and what the cost model expects of larger jobs.

python -m bench.tables
"""

from __future__ import annotations

import json
import sys

from bench import predictions, results
from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, Rates
from orbax_ext.plan.cost import seconds
from orbax_ext.plan.planner import make_plan
from orbax_ext.plan.volumes import Load, Loads
from tools import docs, releases

BUILD = releases.ROOT / "BUILD.md"
MEASURED = releases.ROOT / "bench" / "results"
DEVICES = 8  # a host
HOSTS_OF_A_REPLICA = 8
LAYERS = 640
_LEAF = (16384, 65536)  # 1.07 billion elements: 640 of them make 687 billion
_RATES = Rates(storage=10e9 / 8, fabric=200e9 / 8, storage_total=400e9 / 8)
_GROUP_BYTES = 64 << 20


def main() -> int:
    docs.update(BUILD, "predictions", table())
    docs.update(BUILD, "bench", (MEASURED / "table.md").read_text().rstrip())
    found = results.from_json(json.loads((MEASURED / "results.json").read_text()))
    docs.update(BUILD, "errors", predictions.table(found))
    print(f"{BUILD.name}: the tables of speed are up to date")
    return 0


def table() -> str:
    rows = ["| hosts | replicas | way | a host reads | all read | a host receives | seconds |", "|---" * 7 + "|"]
    for hosts in (64, 512, 4096):
        for way, found in loads(hosts).items():
            figures = f"{found.read / 1e9:,.1f} GB | {found.read_by_all / 1e12:,.1f} TB | {found.link / 1e9:,.1f} GB"
            rows.append(
                f"| {hosts} | {hosts // HOSTS_OF_A_REPLICA} | {way} | {figures} | {seconds(found, _RATES):,.0f} |"
            )
    return "\n".join(rows)


def loads(hosts: int) -> dict[str, Load]:
    """What each way asks of the hosts of a job."""
    inside = HOSTS_OF_A_REPLICA * DEVICES
    mesh = MeshInfo(("dp", "fsdp"), (hosts // HOSTS_OF_A_REPLICA, inside), _owners(hosts))
    block = (_LEAF[0] // inside, _LEAF[1])
    replicas = hosts // HOSTS_OF_A_REPLICA
    chunk = (block[0], block[1] // replicas)  # as all replicas save it together
    leaf = Leaf("w", _LEAF, "bfloat16", 2, block, 0, (("fsdp",), ()), chunk, divisible=True)
    leaves = [leaf] * LAYERS
    found = {"every process reads its own (plain)": Loads(leaves, [mesh], hosts).direct(range(LAYERS))}
    for strategy in ("single", "spread"):
        options = Options(strategy=strategy, replica_axis="dp" if strategy == "single" else None)
        plan = make_plan(leaves, [mesh], options, processes=hosts, group_bytes=_GROUP_BYTES)
        found[f"`{strategy}`"] = Loads(plan.leaves, [mesh], hosts).travelling(plan.groups)
    return found


def _owners(hosts: int) -> tuple[int, ...]:
    return tuple(device // DEVICES for device in range(hosts * DEVICES))


if __name__ == "__main__":
    sys.exit(main())
