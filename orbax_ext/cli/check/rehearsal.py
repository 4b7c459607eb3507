"""A restore into a state that is discarded: what `orbax-ext check` runs on every process."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import type_handlers

from orbax_ext import errors
from orbax_ext import mesh as mesh_lib
from orbax_ext import text as text_lib
from orbax_ext.cli.check import target, verdict
from orbax_ext.cli.check.target import CheckRequest, Specs
from orbax_ext.cli.check.verdict import CheckResult, ProcessResult
from orbax_ext.cli.doctor import installation
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import failure_to_json, failures_from_json
from orbax_ext.redact import redact
from orbax_ext.registration import pytree_handler
from orbax_ext.report.report import last_report, publish
from orbax_ext.storage import checkpoint, counters, s3
from orbax_ext.transfer import memory

T = TypeVar("T")


def rehearse(request: CheckRequest) -> CheckResult:
    """Restores on all processes of this job and returns the same result on each. Errors are part of the result."""
    result = CheckResult(request.path, {})
    limits = Limits(min(300.0, request.timeout), request.timeout)
    if s3.is_s3(request.path) and not s3.s3_enabled():
        s3.enable_s3()
    try:
        with open_session("check", limits, counters.bytes_read) as session:
            arrivals = session.arrive({"versions": installation.versions(), "devices": jax.local_device_count()})
            processes = {
                process: ProcessResult(str(arrival["host"]), int(arrival["devices"]), dict(arrival["versions"]))
                for process, arrival in sorted(arrivals.items())
            }
            result = dataclasses.replace(result, processes=processes)
            if not result.ok:  # other versions on some processes
                return result
            for item in _together(session, "look at the checkpoint", lambda: items(request)):
                result = _rehearse_item(session, request, item, result)
    except Exception as error:
        message = str(error) if isinstance(error, errors.RestoreError) else f"{type(error).__name__}: {error}"
        return dataclasses.replace(result, error=redact(message))
    return result


def items(request: CheckRequest) -> list[checkpoint.CheckpointItem]:
    """Returns the items of the checkpoint that hold arrays; raises `NotACheckpointError` if there are none."""
    with_arrays = [item for item in checkpoint.items_of(request.path, request.step) if item.has_arrays]
    if not with_arrays:
        raise checkpoint.NotACheckpointError(f"{request.path} holds no arrays")
    return with_arrays


def _rehearse_item(
    session: Session, request: CheckRequest, item: checkpoint.CheckpointItem, result: CheckResult
) -> CheckResult:
    """Restores one item; returns the result with what this adds to it."""
    mesh, mesh_from = _together(session, "make the mesh", lambda: _mesh(request, item))
    specs, unfit = _together(session, "choose specs", lambda: target.choose_specs(request, item, mesh.shape))
    unfit_note = "sharded less, because the sharding they were saved with does not fit this mesh"
    result = dataclasses.replace(
        result,
        path=item.path,
        mesh=text_lib.mesh(mesh.shape),
        mesh_from=mesh_from,
        axes=verdict.axes_of(mesh_lib.describe(mesh), session.hosts, target.sharded_shares(item, specs)),
        stored_bytes=result.stored_bytes + item.stored_bytes,
        logical_bytes=result.logical_bytes + item.logical_bytes,
        leaves=result.leaves + len(specs),
        notes=(*result.notes, *([f"{unfit_note}: {text_lib.listing(unfit)}"] if unfit else [])),
    )
    _together(session, "measure memory", lambda: _check_memory(item, specs, mesh))
    measured = _restore(session, request, item, specs, mesh)
    of_all = session.meet("compare", measured)
    return dataclasses.replace(
        result,
        processes={process: part.plus(of_all[process]) for process, part in result.processes.items()},
        travelled=result.travelled + int(measured["travelled"]),
        report="\n".join(filter(None, [result.report, str(last_report() or "")])),
    )


def _together(session: Session, phase: str, work: Callable[[], T]) -> T:
    """Runs `work` on all processes; if it fails on one, all raise the same error."""
    return asyncio.run(session.together(phase, in_thread(work)))


def _restore(
    session: Session, request: CheckRequest, item: checkpoint.CheckpointItem, specs: Specs, mesh: Mesh
) -> dict[str, Any]:
    """Restores one item and returns what this process measured. An error of one process is raised on all."""
    stall_timeout = min(300.0, request.timeout)
    handler = pytree_handler(
        strategy=request.strategy, verify=True, stall_timeout=stall_timeout, timeout=request.timeout
    )
    failure: dict[str, str] = {}
    publish(None)
    try:
        checkpointer = ocp.Checkpointer(handler)
        args = _restore_args(handler, item, specs, mesh)
        started, before = time.monotonic(), counters.bytes_read()
        restored = checkpointer.restore(item.path, args=ocp.args.PyTreeRestore(restore_args=args))
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array)])
    except errors.RestoreError:
        raise  # already raised on all processes
    except Exception as error:
        failure = failure_to_json(error)
    if failed := failures_from_json(session.meet("restore", failure), session.hosts, "restore"):
        raise errors.restore_failed(failed)
    last = last_report()
    return {
        "seconds": time.monotonic() - started,
        "bytes_read": counters.bytes_read() - before,
        "bytes_received": last.own.bytes_received if last else 0,
        "phases": dict(last.seconds) if last else {},
        "taken_over": [one.why for one in last.take_overs if one.process == jax.process_index()] if last else [],
        "travelled": sum(not how.startswith("direct") for how in last.strategy.values()) if last else 0,
    }


def _mesh(request: CheckRequest, item: checkpoint.CheckpointItem) -> tuple[Mesh, str]:
    axes, mesh_from = target.choose_mesh(request, item, jax.device_count(), jax.process_count())
    devices = np.array(jax.devices()).reshape([size for _, size in axes])
    return Mesh(devices, tuple(name for name, _ in axes)), mesh_from


def _check_memory(item: checkpoint.CheckpointItem, specs: Specs, mesh: Mesh) -> None:
    """Raises `MemoryError` if the state can't fit: the system would kill the restore, without a verdict."""
    needed = target.bytes_per_device(item, specs, mesh.shape)
    free = min(memory.free_bytes(device) for device in jax.local_devices())
    if needed > free:
        raise MemoryError(
            f"{text_lib.size(needed)} are needed on each device and {text_lib.size(free)} are free: shard more "
            "with --mesh and --spec, or use more devices"
        )


def _restore_args(
    handler: ocp.PyTreeCheckpointHandler, item: checkpoint.CheckpointItem, specs: Specs, mesh: Mesh
) -> Any:
    keys = {leaf.name for leaf in item.leaves if leaf.key_type}

    def args_for(path: Any, leaf: Any) -> type_handlers.RestoreArgs:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in specs:
            return type_handlers.RestoreArgs()
        sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in specs[name])))
        if name in keys:
            return type_handlers.ArrayRestoreArgs(sharding=sharding)
        return type_handlers.ArrayRestoreArgs(sharding=sharding, global_shape=tuple(leaf.shape), dtype=leaf.dtype)

    metadata = handler.metadata(epath.Path(item.path))
    return jax.tree_util.tree_map_with_path(args_for, getattr(metadata, "tree", metadata))
