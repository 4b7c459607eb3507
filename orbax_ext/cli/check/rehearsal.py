"""A restore for real into a state that is thrown away: what `orbax-ext check` runs on every process."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
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
from orbax_ext.cli.check import verdict
from orbax_ext.cli.check.verdict import Facts, Told
from orbax_ext.cli.doctor import installation
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import failure_to_json, failures_from_json
from orbax_ext.plan.forecast import described, notation
from orbax_ext.redact import redact
from orbax_ext.registration import pytree_handler
from orbax_ext.report.report import last_report, publish
from orbax_ext.storage import checkpoint, counters, s3
from orbax_ext.transfer import memory

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to rehearse."""

    path: str
    step: int | None = None
    mesh: notation.Axes | None = None
    rules: tuple[notation.Rule, ...] = ()
    timeout: float = 600.0
    strategy: str = "auto"


def rehearse(request: Request) -> Facts:
    """Restores on all processes of this job; the same facts on each of them. Does not raise for what goes wrong."""
    facts = Facts(request.path, {})
    limits = Limits(min(300.0, request.timeout), request.timeout)
    if s3.is_s3(request.path) and not s3.s3_enabled():
        s3.enable_s3()
    try:
        with open_session("check", limits, counters.bytes_read) as session:
            arrivals = session.arrive({"versions": installation.versions(), "devices": jax.local_device_count()})
            told = {p: Told(str(a["host"]), int(a["devices"]), dict(a["versions"])) for p, a in arrivals.items()}
            facts = dataclasses.replace(facts, told=dict(sorted(told.items())))
            if verdict.versions_break(told):
                return facts
            for item in _together(session, "look at the checkpoint", lambda: items(request)):
                facts = _rehearse_item(session, request, item, facts)
    except Exception as error:
        words_for_it = str(error) if isinstance(error, errors.RestoreError) else f"{type(error).__name__}: {error}"
        return dataclasses.replace(facts, error=redact(words_for_it))
    return facts


def items(request: Request) -> list[checkpoint.CheckpointItem]:
    """The parts of the checkpoint that hold arrays."""
    found = [item for item in checkpoint.items_of(request.path, request.step) if item.has_arrays]
    if not found:
        raise checkpoint.NotACheckpointError(f"{request.path} holds no arrays")
    return found


def _rehearse_item(session: Session, request: Request, item: checkpoint.CheckpointItem, facts: Facts) -> Facts:
    mesh, mesh_from = _together(session, "make the mesh", lambda: _mesh(request, item))
    chosen = _together(session, "choose specs", lambda: _specs(request, item, dict(mesh.shape)))
    hosts = {process: told.host for process, told in facts.told.items()}
    facts = dataclasses.replace(
        facts,
        path=item.path,
        mesh=str(mesh_lib.describe(mesh)),
        mesh_from=mesh_from,
        axes=verdict.axes_against_processes(mesh_lib.describe(mesh), hosts, _cut(item, chosen.specs)),
        stored_bytes=facts.stored_bytes + item.stored_bytes,
        logical_bytes=facts.logical_bytes + item.logical_bytes,
        leaves=facts.leaves + len(chosen.specs),
        notes=(*facts.notes, *chosen.notes),
    )
    _together(session, "measure memory", lambda: _check_room(item, chosen.specs, mesh))
    mine = _restore(session, request, item, chosen.specs, mesh)
    all_told = session.meet("compare", mine)
    last = last_report()
    return dataclasses.replace(
        facts,
        told={process: _add(told, all_told[process]) for process, told in facts.told.items()},
        travelled=facts.travelled + int(mine["travelled"]),
        report="\n".join(filter(None, [facts.report, str(last or "")])),
    )


def _together(session: Session, phase: str, work: Callable[[], T]) -> T:
    """Does something on all processes; if one fails, all raise the same error."""
    return asyncio.run(session.together(phase, in_thread(work)))


def _restore(
    session: Session,
    request: Request,
    item: checkpoint.CheckpointItem,
    specs: Mapping[str, notation.Spec],
    mesh: Mesh,
) -> dict[str, Any]:
    """One restore; what this process has to say of it. A failure of one process that is not yet all's becomes it."""
    limits = {"stall_timeout": min(300.0, request.timeout), "timeout": request.timeout}
    handler = pytree_handler(strategy=request.strategy, verify=True, **limits)
    failure: dict[str, str] = {}
    publish(None)
    try:
        checkpointer = ocp.Checkpointer(handler)
        args = _restore_args(handler, item, specs, mesh)
        started, before = time.monotonic(), counters.bytes_read()
        restored = checkpointer.restore(item.path, args=ocp.args.PyTreeRestore(restore_args=args))
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(restored) if isinstance(leaf, jax.Array)])
    except errors.RestoreError:
        raise  # on all processes alike
    except Exception as error:
        failure = failure_to_json(error)
    failed = failures_from_json(session.meet("restore", failure), session.hosts, "restore")
    if failed:
        raise errors.restore_failed(failed)
    last = last_report()
    return {
        "seconds": time.monotonic() - started,
        "bytes_read": counters.bytes_read() - before,
        "bytes_received": last.own.bytes_received if last else 0,
        "phases": dict(last.seconds) if last else {},
        "travelled": sum(not how.startswith("direct") for how in last.strategy.values()) if last else 0,
    }


def _add(told: Told, more: Mapping[str, Any]) -> Told:
    return dataclasses.replace(
        told,
        bytes_read=told.bytes_read + int(more["bytes_read"]),
        bytes_received=told.bytes_received + int(more["bytes_received"]),
        seconds=told.seconds + float(more["seconds"]),
        phases={
            phase: told.phases.get(phase, 0.0) + more["phases"].get(phase, 0.0)
            for phase in {**told.phases, **more["phases"]}
        },
    )


def _mesh(request: Request, item: checkpoint.CheckpointItem) -> tuple[Mesh, str]:
    count = jax.device_count()
    if request.mesh is not None:
        wanted = math.prod(size for _, size in request.mesh)
        if wanted != count:
            raise ValueError(
                f"--mesh {text_lib.mesh(dict(request.mesh))} has {wanted} devices, but this job has {count}: "
                f"{text_lib.count(jax.process_count(), 'process')} x {jax.local_device_count()}"
            )
        return _mesh_of(request.mesh), "--mesh"
    if item.mesh and math.prod(size for _, size in item.mesh) == count:
        return _mesh_of(item.mesh), "the checkpoint, which was saved on it"
    return _mesh_of(
        (("replica", count),)
    ), "the number of devices: everything is a copy (--mesh and --spec change that)"


def _mesh_of(axes: notation.Axes) -> Mesh:
    sizes = [size for _, size in axes]
    return Mesh(np.array(jax.devices()).reshape(sizes), tuple(name for name, _ in axes))


@dataclasses.dataclass(frozen=True)
class _Chosen:
    specs: dict[str, notation.Spec]  # of the leaves that are restored as arrays on devices
    notes: tuple[str, ...]


def _specs(request: Request, item: checkpoint.CheckpointItem, mesh: Mapping[str, int]) -> _Chosen:
    specs: dict[str, notation.Spec] = {}
    unfit: list[str] = []
    for leaf in item.leaves:
        if leaf.array is None or leaf.kind not in ("jax.Array", "array"):
            continue
        saved = leaf.sharding.spec if leaf.sharding else ()
        spec, reason = described.choose_spec(leaf.name, leaf.array.header.shape, saved, request.rules, mesh)
        if reason:
            unfit.append(leaf.name)
        specs[leaf.name] = () if leaf.key_type else spec
    notes: tuple[str, ...] = ()
    if unfit:
        shown = ", ".join(unfit[:3]) + (f" and {len(unfit) - 3} more" if len(unfit) > 3 else "")
        notes = (f"restored as copies, because the sharding they were saved with does not fit this mesh: {shown}",)
    return _Chosen(specs, notes)


def _cut(item: checkpoint.CheckpointItem, specs: Mapping[str, notation.Spec]) -> dict[str, float]:
    """By mesh axis, the share of the bytes that is sharded over it."""
    sizes = {leaf.name: leaf.array.header.logical_bytes for leaf in item.leaves if leaf.array and leaf.name in specs}
    total = sum(sizes.values()) or 1
    found: dict[str, float] = {}
    for name, spec in specs.items():
        for axis in {axis for axes in spec for axis in axes}:
            found[axis] = found.get(axis, 0.0) + sizes[name] / total
    return found


def _check_room(item: checkpoint.CheckpointItem, specs: Mapping[str, notation.Spec], mesh: Mesh) -> None:
    """A restore that can't fit would be killed by the system, which is no verdict."""
    sizes = dict(mesh.shape)
    needed = 0
    for leaf in item.leaves:
        if leaf.array is not None and leaf.name in specs:
            header = leaf.array.header
            needed += math.prod(notation.block_shape(specs[leaf.name], header.shape, sizes)) * header.itemsize
    free = min(memory.free_bytes(device) for device in jax.local_devices())
    if needed > free:
        raise MemoryError(
            f"{text_lib.size(needed)} are needed on each device and {text_lib.size(free)} are free: shard more "
            "with --mesh and --spec, or use more devices"
        )


def _restore_args(
    handler: ocp.PyTreeCheckpointHandler,
    item: checkpoint.CheckpointItem,
    specs: Mapping[str, notation.Spec],
    mesh: Mesh,
) -> Any:
    keys = {leaf.name for leaf in item.leaves if leaf.key_type}

    def args_for(path: Any, leaf: Any) -> type_handlers.RestoreArgs:
        name = ".".join(str(_key(entry)) for entry in path)
        if name not in specs:
            return type_handlers.RestoreArgs()
        sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in specs[name])))
        if name in keys:
            return type_handlers.ArrayRestoreArgs(sharding=sharding)
        return type_handlers.ArrayRestoreArgs(sharding=sharding, global_shape=tuple(leaf.shape), dtype=leaf.dtype)

    metadata = handler.metadata(epath.Path(item.path))
    return jax.tree_util.tree_map_with_path(args_for, getattr(metadata, "tree", metadata))


def _key(entry: Any) -> Any:
    return next(getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name))
