"""`orbax-ext demo`: one restore, three ways, on a local cluster of real processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

import orbax_ext
from orbax_ext import lab, version
from orbax_ext.cli import exits
from orbax_ext.lab import handlers
from orbax_ext.storage import counters

WAYS = {
    "plain": "plain Orbax",
    "stock": "Orbax, single replica",
    "ours": "orbax_ext",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts 4 processes with 8 CPU devices each, mesh (pp=1, dp=4, tp=8), saves a small training state and "
        "restores it under jax.set_mesh: with plain Orbax, with its single-replica handler, and with orbax_ext."
    )
    parser.epilog = "example: orbax-ext demo --json"
    parser.add_argument("--processes", type=int, default=4, help="processes, one data-parallel replica each (4)")
    parser.add_argument("--devices", type=int, default=8, help="devices of each process (8)")
    parser.add_argument("--megabytes", type=int, default=32, help="size of the state (32)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=run)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to restore, and what came of it over all processes."""

    way: str
    outcome: str
    seconds: float | None = None
    megabytes_read: float | None = None
    exact: bool = False


def run(args: argparse.Namespace) -> int:
    if args.processes < 2 or args.devices < 1 or args.megabytes < 1:
        raise exits.UserError("a demo needs at least 2 processes, 1 device each and 1 megabyte")
    _say(f"starting {args.processes} processes x {args.devices} devices ...")
    with (
        tempfile.TemporaryDirectory(prefix="orbax_ext_demo_") as path,
        lab.Cluster(args.processes, args.devices) as cluster,
    ):
        _say(f"saving {args.megabytes} MB with plain Orbax ...")
        cluster.run(save, path, args.megabytes)
        rows = []
        for way, name in WAYS.items():
            _say(f"restoring with {name} under jax.set_mesh ...")
            rows.append(_row(name, cluster.outcomes(restore, path, args.megabytes, way)))
    print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) if args.json else _table(rows))
    return exits.EXIT_OK if rows[-1].exact else exits.EXIT_BAD_VERDICT


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _row(name: str, outcomes: Sequence[lab.Outcome]) -> Row:
    bad = [outcome for outcome in outcomes if not outcome.ok]
    if bad:
        told = str(bad[0].failure or bad[0].state).splitlines()[0]
        return Row(name, f"failed on {len(bad)} of {len(outcomes)}: {told[:60]}")
    values = [outcome.value for outcome in outcomes]
    changed = sorted({leaf for value in values for leaf in value["changed"]})
    return Row(
        name,
        f"changed {', '.join(changed)}" if changed else "restored",
        round(max(value["seconds"] for value in values), 2),
        round(sum(value["bytes_read"] for value in values) / 1e6, 1),
        not changed,
    )


def _table(rows: Sequence[Row]) -> str:
    head = ("", "outcome", "seconds", "MB read", "exact")
    body = [
        (row.way, row.outcome, _number(row.seconds), _number(row.megabytes_read), "yes" if row.exact else "no")
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *body)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    versions = f"Orbax {version.orbax_version()}, JAX {jax.__version__}, orbax_ext {version.__version__}"
    return "\n".join(["", *(line.rstrip() for line in lines), "", versions])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# Run on the processes.


def save(path: str, megabytes: int) -> None:
    data, mesh = _state(megabytes), _mesh()
    state = {
        name: jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda index, array=array: array[index]
        )
        for name, (array, spec) in data.items()
    }
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()


def restore(path: str, megabytes: int, way: str) -> dict[str, Any]:
    data, mesh = _state(megabytes), _mesh()
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
        for name, (array, spec) in data.items()
    }
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with jax.set_mesh(mesh), _handler(way), ocp.CheckpointManager(path) as manager:
        started, read = time.monotonic(), counters.bytes_read()
        restored = jax.block_until_ready(manager.restore(0, args=args))
        seconds, read = time.monotonic() - started, counters.bytes_read() - read
    changed = [name for name, (array, _) in data.items() if not _same(restored[name], array)]
    return {"seconds": seconds, "bytes_read": read, "changed": changed}


def _state(megabytes: int) -> dict[str, tuple[np.ndarray, PartitionSpec]]:
    """A small training state with what a broadcast may change: small integers, a mask, zeros with a sign."""
    random = np.random.default_rng(0)
    rows = megabytes * 1024 // 10  # 10 bytes per weight: bfloat16 weights, two float32 moments
    weights = random.standard_normal((-(-rows // 64) * 64, 1024), np.float32)
    sharded, whole = PartitionSpec("tp"), PartitionSpec()
    return {
        "weights": (weights.astype(jax.numpy.bfloat16), sharded),
        "first_moment": (weights, sharded),
        "second_moment": (np.where(weights > 0, weights, np.float32(-0.0)), sharded),
        "quantized": (random.integers(-128, 128, (64, 64)).astype(np.int8), sharded),
        "mask": (random.integers(0, 2, (64,)).astype(bool), whole),
        "step": (np.asarray(1000, np.int32), whole),
    }


def _mesh() -> Mesh:
    devices = np.array(jax.devices()).reshape(1, jax.process_count(), jax.local_device_count())
    return Mesh(devices, ("pp", "dp", "tp"))


def _handler(way: str) -> AbstractContextManager[Any]:
    if way == "ours":
        return orbax_ext.registered(replica_axis="dp", strategy="single")
    stock = type_handlers.SingleReplicaArrayHandler(replica_axis_index=1) if way == "stock" else None
    return handlers.installed(stock)


def _same(restored: jax.Array, array: np.ndarray) -> bool:
    return restored.dtype == array.dtype and all(
        np.asarray(shard.data).tobytes() == array[shard.index].tobytes() for shard in restored.addressable_shards
    )
