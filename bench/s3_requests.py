"""Requests per restore as processes grow, plain Orbax beside orbax_ext: `python -m bench.s3_requests`.

Both restore the same checkpoint from the same server, with S3 enabled by orbax_ext, because no released Orbax speaks
s3://. Counted at a proxy in front of the server, from the call of `CheckpointManager.restore` to its return.
"""

from __future__ import annotations

import argparse
import collections
import sys
from typing import Any

from orbax_ext import lab
from orbax_ext.lab import handlers
from tests.support import s3_server, states
from tests.support.s3_proxy import FaultProxy, Request
from tests.support.states import MeshSpec, P, Spec

LEAVES = 32
STATE = {f"layer_{number}": Spec((64, 64), "float32", P("tp")) for number in range(LEAVES)}
WAYS = {"plain Orbax": ("plain", False), "orbax_ext": ("ours", True)}

_manager: Any = None


def mesh(processes: int) -> MeshSpec:
    return MeshSpec((processes, 2), ("dp", "tp"))


def prepare(path: str, processes: int, share_metadata: bool) -> None:
    """Saves the checkpoint if there is none, and makes the manager that will restore it."""
    import orbax.checkpoint as ocp

    from orbax_ext.storage import s3

    global _manager
    s3.enable_s3(share_metadata=share_metadata)
    _manager = ocp.CheckpointManager(path)
    if _manager.latest_step() is None:
        _manager.save(0, args=ocp.args.PyTreeSave(states.make_state(STATE, mesh(processes).make())))
        _manager.wait_until_finished()


def restore(processes: int, how: str) -> list[str]:
    import jax
    import orbax.checkpoint as ocp

    import orbax_ext

    made = mesh(processes).make()
    abstract = states.abstract_state(STATE, made)
    with handlers.registered(how, **({"replica_axis": "dp"} if how == "ours" else {})):
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = jax.block_until_ready(_manager.restore(0, args=args))
    return states.differences(restored, STATE, made)


def count(processes: int, proxy: FaultProxy, verbose: bool) -> dict[str, list[Request]]:
    """What each way to restore asks of the store, on so many processes."""
    path = f"s3://table/run{processes}"
    env = {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}
    found = {}
    with lab.Cluster(processes, 2, env=env, timeout=300) as cluster:
        for way, (how, share_metadata) in WAYS.items():
            cluster.run(prepare, path, processes, share_metadata)
            proxy.requests.clear()
            assert states.all_differences(cluster.run(restore, processes, how)) == []
            found[way] = list(proxy.requests)
            if verbose:
                for line, times in sorted(collections.Counter(request.line for request in found[way]).items()):
                    print(f"  {way}, {processes} processes: {times:3} x {line}", file=sys.stderr)
            cluster.stop()  # nothing may be left in a cache
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--verbose", action="store_true", help="print every request")
    arguments = parser.parse_args()
    print("| processes | way | metadata requests | of them LIST | array requests | bytes | all requests per process |")
    print("|---|---|---|---|---|---|---|")
    with s3_server.running() as port, FaultProxy(port) as proxy:
        s3_server.make_bucket(port, "table")
        for processes in arguments.processes:
            for way, requests in count(processes, proxy, arguments.verbose).items():
                metadata = [request for request in requests if not _is_array_data(request.line)]
                listings = sum("list-type" in request.line for request in metadata)
                arrays, sent = len(requests) - len(metadata), sum(request.sent for request in requests)
                print(
                    f"| {processes} | {way} | {len(metadata)} | {listings} | {arrays} | {sent} | "
                    f"{len(requests) / processes:.1f} |",
                    flush=True,
                )


def _is_array_data(line: str) -> bool:
    """Whether TensorStore asks, for a value, an index node or a manifest of its database."""
    return line.startswith("GET") and ("/d/" in line or line.endswith(".ocdbt"))


if __name__ == "__main__":
    main()
