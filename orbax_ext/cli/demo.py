"""`orbax-ext demo`: restores one state with three handlers, on a local cluster of real processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext import lab, version
from orbax_ext import text as text_lib
from orbax_ext.cli import exits
from orbax_ext.lab import handlers
from orbax_ext.storage import counters

DESCRIPTION = """Starts 4 processes with 8 CPU devices each, on the mesh (pp=1, dp=4, tp=8),
saves a small training state and restores it under jax.set_mesh: with plain
Orbax, with its single-replica handler, and with orbax_ext."""
EPILOG = """example: orbax-ext demo --json. Exit code 0: orbax_ext restored every byte; 1:
it did not."""
HANDLERS = {  # as `handlers.registered` names them
    "plain": ("plain Orbax", {}),
    "stock": ("Orbax, single replica", {"replica_axis_index": 1}),
    "ours": ("orbax_ext", {"replica_axis": "dp"}),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=4, help="number of processes, one replica each (4)")
    parser.add_argument("--devices", type=int, default=8, help="number of devices of each process (8)")
    parser.add_argument("--megabytes", type=int, default=32, help="size of the state in megabytes (32)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


@dataclasses.dataclass(frozen=True)
class Row:
    """One handler, and what it did on all processes together."""

    way: str
    outcome: str
    seconds: float | None = None
    megabytes_read: float | None = None
    exact: bool = False


def run(args: argparse.Namespace) -> bool:
    if args.processes < 2 or args.devices < 1 or args.megabytes < 1:
        raise exits.UserError("a demo needs at least 2 processes, 1 device each and 1 megabyte")
    where = f"{text_lib.count(args.processes, 'process')} x {text_lib.count(args.devices, 'device')}"
    _print_progress(f"starting {where} ...")
    with (
        tempfile.TemporaryDirectory(prefix="orbax_ext_demo_") as path,
        lab.Cluster(args.processes, args.devices) as cluster,
    ):
        _print_progress(f"saving {text_lib.size(args.megabytes * 1e6)} with plain Orbax ...")
        cluster.run(save, path, args.megabytes)
        rows = []
        for kind, (name, knobs) in HANDLERS.items():
            _print_progress(f"restoring with {name} under jax.set_mesh ...")
            rows.append(row_of(name, cluster.outcomes(restore, path, args.megabytes, kind, knobs)))
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        versions = f"Orbax {version.orbax_version()}, JAX {jax.__version__}, orbax_ext {version.__version__}"
        print(f"\n{table(rows)}\n\n{versions}")
    return rows[-1].exact


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def row_of(name: str, outcomes: Sequence[lab.Outcome]) -> Row:
    """Returns the row of one handler: the slowest process's seconds, and the bytes that all processes read."""
    if bad := [outcome for outcome in outcomes if not outcome.ok]:
        reason = str(bad[0].failure or bad[0].state).splitlines()[0]
        return Row(name, f"failed on {len(bad)} of {len(outcomes)}: {reason[:60]}")
    values = [outcome.value for outcome in outcomes]
    changed = sorted({leaf for value in values for leaf in value["changed"]})
    return Row(
        name,
        f"changed {', '.join(changed)}" if changed else "restored",
        round(max(value["seconds"] for value in values), 2),
        round(sum(value["bytes_read"] for value in values) / 1e6, 1),
        not changed,
    )


def table(rows: Sequence[Row]) -> str:
    body = [
        (
            row.way,
            row.outcome,
            "-" if row.seconds is None else text_lib.seconds(row.seconds),
            "-" if row.megabytes_read is None else text_lib.size(row.megabytes_read * 1e6),
            "yes" if row.exact else "no",
        )
        for row in rows
    ]
    return text_lib.table(("", "outcome", "time", "read", "exact"), body, right=(2, 3), indent="")


# Run on the processes.


def save(path: str, megabytes: int) -> None:
    arrays, abstract = _state(megabytes, _mesh())
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(orbax_ext.shard(arrays, abstract)))
        manager.wait_until_finished()


def restore(path: str, megabytes: int, kind: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    mesh = _mesh()
    arrays, abstract = _state(megabytes, mesh)
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with jax.set_mesh(mesh), handlers.registered(kind, **knobs), ocp.CheckpointManager(path) as manager:
        started, read = time.monotonic(), counters.bytes_read()
        restored = jax.block_until_ready(manager.restore(0, args=args))
        seconds, read = time.monotonic() - started, counters.bytes_read() - read
    changed = [name for name, array in arrays.items() if not _same(restored[name], array)]
    return {"seconds": seconds, "bytes_read": read, "changed": changed}


def _state(megabytes: int, mesh: Mesh) -> tuple[dict[str, np.ndarray], dict[str, jax.ShapeDtypeStruct]]:
    """Returns a small training state with data that a broadcast may change: small integers, a mask, signed zeros."""
    random = np.random.default_rng(0)
    rows = megabytes * 1024 // 10  # 10 bytes per weight: bfloat16 weights, two float32 moments
    weights = random.standard_normal((-(-rows // 64) * 64, 1024), np.float32)
    arrays = {
        "weights": weights.astype(jax.numpy.bfloat16),
        "first_moment": weights,
        "second_moment": np.where(weights > 0, weights, np.float32(-0.0)),
        "quantized": random.integers(-128, 128, (64, 64)).astype(np.int8),
        "mask": random.integers(0, 2, (64,)).astype(bool),
        "step": np.asarray(1000, np.int32),
    }
    sharded, whole = NamedSharding(mesh, PartitionSpec("tp")), NamedSharding(mesh, PartitionSpec())
    return arrays, {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharded if array.ndim == 2 else whole)
        for name, array in arrays.items()
    }


def _mesh() -> Mesh:
    devices = np.array(jax.devices()).reshape(1, jax.process_count(), jax.local_device_count())
    return Mesh(devices, ("pp", "dp", "tp"))


def _same(restored: jax.Array, array: np.ndarray) -> bool:
    return restored.dtype == array.dtype and all(
        np.asarray(shard.data).tobytes() == array[shard.index].tobytes() for shard in restored.addressable_shards
    )
