"""What the processes of the demo do: save a small training state, and restore it in several ways."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.cli.demo import storage
from orbax_ext.lab import handlers
from orbax_ext.report import page
from orbax_ext.report.spans import Span, seconds_by_phase
from orbax_ext.storage import counters
from orbax_ext.storage.checkpoint import digest_files

AXES = ("pp", "dp", "tp")
LATE_PROCESS = 0  # whose reads are held back where storage is late
_TOGETHER = ("wait", "connect", "compile")  # phases of a restore that plain Orbax does not have


def save(path: str, megabytes: int, steps: Sequence[int], sizes: Sequence[int]) -> None:
    """Saves the state as some steps, with plain Orbax."""
    arrays, abstract = _state(megabytes, _mesh(sizes))
    with ocp.CheckpointManager(path) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.PyTreeSave(orbax_ext.shard(arrays, abstract)))
        manager.wait_until_finished()


def restore(
    path: str,
    megabytes: int,
    kind: str,
    *,
    sizes: Sequence[int],
    set_mesh: bool = True,
    step: int = 1,
    megabytes_per_second: float | None = None,
    late: float | None = None,
) -> dict[str, Any]:
    """Restores with one of the handlers; returns what happened on this process.

    The manager is not closed: closing waits for all processes, and some handlers leave processes hanging.
    """
    mesh = _mesh(sizes)
    arrays, abstract = _state(megabytes, mesh)
    with contextlib.ExitStack() as stack:
        if set_mesh:
            stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(handlers.registered(kind, **_KNOBS[kind]))
        manager = ocp.CheckpointManager(path)
        if megabytes_per_second is not None:
            stack.enter_context(storage.paced(megabytes_per_second * 1e6))
        if late is not None:
            orbax_ext.barrier("late reader")  # else a process that starts slowly would not have to wait for long
            if jax.process_index() == LATE_PROCESS:
                stack.enter_context(storage.late(late))
        started, read = time.monotonic(), counters.bytes_read()
        restored = jax.block_until_ready(manager.restore(step, args=_args(abstract)))
        seconds, read = time.monotonic() - started, counters.bytes_read() - read
    report = orbax_ext.last_report() if kind == "ours" else None
    return {
        "seconds": seconds,
        "bytes_read": read,
        "changed": _changes(restored, arrays),
        "waiting": _waiting(report.own.spans) if report is not None else None,
        "meeting": _first_meeting(report.own.spans) if report is not None else None,
        "taken_over": sorted({one.process for one in report.take_overs}) if report is not None else [],
        "page": page.render(report) if report is not None and jax.process_index() == 0 else None,
    }


def damaged_leaves(item: str) -> tuple[str, ...]:
    """Returns the leaves of a checkpoint that can't be read, without any of the handlers."""
    return tuple(leaf for leaf, digest in digest_files.compute(item) if isinstance(digest, str))


def _waiting(spans: Iterable[Span]) -> float:
    """Returns the time in which a restore did what plain Orbax does not do; overlapping spans count once."""
    together = [dataclasses.replace(span, phase="together") for span in spans if span.phase in _TOGETHER]
    return seconds_by_phase(together).get("together", 0.0)


def _first_meeting(spans: Iterable[Span]) -> float | None:
    """Returns how long a process was in its first meeting."""
    waits = [span for span in spans if span.phase == "wait"]
    return min(waits, key=lambda span: span.start).seconds if waits else None


def restore_before(path: str, megabytes: int, *, sizes: Sequence[int]) -> dict[str, Any]:
    """Restores the newest step that every process can restore."""
    arrays, abstract = _state(megabytes, _mesh(sizes))
    with handlers.registered("ours", **_KNOBS["ours"]):
        started = time.monotonic()
        found = orbax_ext.restore_latest_valid(ocp.CheckpointManager(path), _args(abstract))
        seconds = time.monotonic() - started
    return {"seconds": seconds, "step": found.step, "changed": _changes(found.state, arrays)}


_KNOBS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "stock": {"replica_axis_index": AXES.index("dp")},
    "ours": {"replica_axis": "dp", "strategy": "auto", "progress": False},
}


def _args(abstract: Any) -> Any:
    return ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))


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


def _mesh(sizes: Sequence[int]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), AXES)


def _changes(restored: Mapping[str, jax.Array], arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns how each changed leaf differs: its dtype, or its bits."""
    changes = {}
    for name, array in arrays.items():
        if restored[name].dtype != array.dtype:
            changes[name] = f"{array.dtype} became {restored[name].dtype}"
        elif not all(
            np.asarray(shard.data).tobytes() == array[shard.index].tobytes()
            for shard in restored[name].addressable_shards
        ):
            zeros = all(np.array_equal(shard.data, array[shard.index]) for shard in restored[name].addressable_shards)
            changes[name] = "-0.0 became 0.0" if zeros else "other bits"
    return changes
