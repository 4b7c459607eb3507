"""Counts the requests of a restore from S3 on 1 to 8 processes, with plain Orbax and with orbax_ext.

python -m bench.s3_requests [--write]

Both restore the same checkpoint from the same server. S3 is enabled by orbax_ext for both, because no released Orbax
supports s3://. A proxy in front of the server counts from the call of `CheckpointManager.restore` to its return.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import math
import sys
from collections.abc import Sequence
from typing import Any

from orbax_ext import lab
from orbax_ext.lab import handlers
from tests.support import s3_server, states
from tests.support.s3_proxy import FaultProxy, Request
from tests.support.states import MeshSpec, P, Spec
from tools import markdown

LEAVES = 32
PAGE = markdown.Page(
    "bench/results/s3_requests.md",
    "S3 requests per restore, measured",
    f"""{LEAVES} leaves of 16 KiB, saved by as many processes as restore them, with one data-parallel replica per
    process (Orbax {importlib.metadata.version("orbax-checkpoint")}). Requests are counted at a proxy in front of the
    server, during `CheckpointManager.restore` alone. No released Orbax supports `s3://`, so plain Orbax has it from
    orbax_ext too, with `share_metadata=False`; orbax_ext restores with strategy `single`. Array requests and bytes
    differ a good deal from run to run, most likely because TensorStore merges reads that come close together in
    time.""",
    "python -m bench.s3_requests --write",
)
STATE = {f"layer_{number}": Spec((64, 64), "float32", P("tp")) for number in range(LEAVES)}
HANDLERS = {"plain Orbax": ("plain", False), "orbax_ext": ("ours", True)}  # with or without sharing metadata
HEAD = (
    *("processes", "handler", "metadata requests", "of them LIST"),
    *("array requests", "bytes", "all requests per process"),
)

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


def restore(processes: int, handler: str) -> list[str]:
    """Restores and returns the differences from what was saved."""
    import jax
    import orbax.checkpoint as ocp

    import orbax_ext

    # Nobody reads in place of a late process: that would be counted twice.
    knobs = {"replica_axis": "dp", "late_seconds": math.inf} if handler == "ours" else {}
    made = mesh(processes).make()
    abstract = states.abstract_state(STATE, made)
    with handlers.registered(handler, **knobs):
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = jax.block_until_ready(_manager.restore(0, args=args))
    return states.differences(restored, STATE, made)


def count(processes: int, proxy: FaultProxy, verbose: bool) -> dict[str, list[Request]]:
    """Returns the requests of a restore with each handler."""
    path = f"s3://table/run{processes}"
    env = {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}
    requests = {}
    with lab.Cluster(processes, 2, env=env, timeout=300) as cluster:
        for name, (handler, share_metadata) in HANDLERS.items():
            cluster.run(prepare, path, processes, share_metadata)
            proxy.requests.clear()
            assert states.all_differences(cluster.run(restore, processes, handler)) == []
            requests[name] = list(proxy.requests)
            if verbose:
                for line, times in sorted(collections.Counter(request.line for request in requests[name]).items()):
                    print(f"  {name}, {processes} processes: {times:3} x {line}", file=sys.stderr)
            cluster.stop()  # so that the next restore finds nothing in a cache
    return requests


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.s3_requests", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of processes")
    parser.add_argument("--verbose", action="store_true", help="print every request")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    rows = []
    with s3_server.running() as port, FaultProxy(port) as proxy:
        s3_server.make_bucket(port, "table")
        for processes in args.processes:
            for name, requests in count(processes, proxy, args.verbose).items():
                rows.append((processes, name, *_figures(requests, processes)))
                print(markdown.row(rows[-1]), flush=True)
    if args.write:
        PAGE.write(markdown.table(HEAD, rows))
    return 0


def _figures(requests: Sequence[Request], processes: int) -> tuple[object, ...]:
    metadata = [request for request in requests if not _is_array_data(request.line)]
    listings = sum("list-type" in request.line for request in metadata)
    arrays, sent = len(requests) - len(metadata), sum(request.sent for request in requests)
    return len(metadata), listings, arrays, sent, f"{len(requests) / processes:.1f}"


def _is_array_data(line: str) -> bool:
    """Returns whether TensorStore made the request: for a value, an index node or a manifest of its database."""
    return line.startswith("GET") and ("/d/" in line or line.endswith(".ocdbt"))


if __name__ == "__main__":
    sys.exit(main())
