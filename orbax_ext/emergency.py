"""Restores of Orbax's emergency checkpoint manager: from the hosts that still have the step, then from storage.

Every process loads what its own local directory has of the step. All tell each other what they have loaded, and
devices that lack a block receive it from devices that have it. Leaves of which no process has some block are read from
the persistent checkpoint of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath

from orbax_ext import text
from orbax_ext.handler import BroadcastArrayHandler, one_at_a_time
from orbax_ext.meeting import arrival, holdings
from orbax_ext.meeting.session import Limits, Session, gather, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan.holders import Columns, LocalPlan, plan_relays
from orbax_ext.plan.memory import group_bytes
from orbax_ext.report import collect, progress
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request, given_request
from orbax_ext.transfer.local_blocks import LocalBlocks
from orbax_ext.transfer.memory import memory_limit
from orbax_ext.transfer.relays import RelayExecutor
from orbax_ext.transfer.verify import verify
from orbax_ext.upstream import emergency as upstream
from orbax_ext.upstream.hooks import install

_NOWHERE = epath.Path("/nowhere")  # of a step that is not there; nothing is read from it


def serve(handler: Callable[[], BroadcastArrayHandler]) -> Callable[[], None]:
    """Makes every emergency manager restore through orbax_ext; returns a function that undoes it.

    `handler` returns the handler whose knobs count, at each restore.
    """
    return install(upstream.HOOKS, _Service(handler))


class _Service:
    """What the hooks call; see `orbax_ext.upstream.emergency.Service`."""

    def __init__(self, handler: Callable[[], BroadcastArrayHandler]) -> None:
        self._handler = handler

    def restore(self, step: upstream.EmergencyStep) -> Sequence[jax.Array]:
        return upstream.run_sync(_restore(self._handler(), step))

    def share(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        arrivals = gather("emergency", {"data": data}, _limits(self._handler()))
        return [arrivals[process]["data"] for process in sorted(arrivals)]


async def _restore(handler: BroadcastArrayHandler, step: upstream.EmergencyStep) -> Sequence[jax.Array]:
    """Returns the leaves of a step, in the order of `step.names`."""
    async with one_at_a_time():
        arrays, persistent = await _restore_from_hosts(handler, step)
    absent = [index for index in range(len(step.names)) if index not in arrays]
    if absent:
        async with arrival.failing_together(handler.options):
            directory = _must_exist(persistent, step)
        logging.info(
            "orbax_ext: %s of step %d are on no host and are read from %s",
            text.count(len(absent), "leaf"),
            step.step,
            directory,
        )
        infos = upstream.param_infos(directory, [step.names[index] for index in absent])
        restored = await handler.deserialize(infos, [step.args[index] for index in absent])
        arrays |= dict(zip(absent, restored, strict=True))
    return [arrays[index] for index in range(len(step.names))]


async def _restore_from_hosts(
    handler: BroadcastArrayHandler, step: upstream.EmergencyStep
) -> tuple[dict[int, jax.Array], epath.Path | None]:
    """Returns the leaves that the hosts have together, and the directory of the step in persistent storage."""
    options = handler.options
    with collect.recorded() as recorder, progress.shown(options.progress, recorder):
        async with arrival.failing_together(options):
            with recorder.span("describe"):
                local, persistent = await in_thread(step.find_local), await in_thread(step.find_persistent)
                request = given_request(upstream.param_infos(persistent or _NOWHERE, step.names), step.args)
                limit = memory_limit(options, request)
            with recorder.span("plan"):
                tables = _tables(request)
        with open_session("restore", _limits(handler), recorder.bytes_read, recorder.waited) as session:
            recorder.attach(session)
            agreed = await arrival.arrive(session, request.leaves, request.mesh_infos, options, limit)
            blocks = LocalBlocks(handler, request, tables)
            loading = recorder.timed("read", blocks.read(local, upstream.param_infos(local or _NOWHERE, step.names)))
            _, told = await session.together_telling(
                "read the local step", loading, lambda: {"loaded": holdings.pack(blocks.loaded), "step": step.step}
            )
            arrival.check_agreement(
                {process: {"step": str(message["step"])} for process, message in told.items()}, session.hosts
            )
            with recorder.span("plan"):
                loaded = _loaded_by_all(tables, told)
                plan = plan_relays(request.leaves, tables, loaded, group_bytes(agreed))
            arrays = await _exchange(session, request, tables, plan, blocks, recorder, options.stall_timeout)
            if options.verify and len(arrays) == len(step.names):
                with recorder.span("verify"):
                    await verify(session, request, [arrays[index] for index in range(len(arrays))])
            await collect.collect(session, recorder)
    return arrays, persistent


async def _exchange(
    session: Session,
    request: Request,
    tables: Mapping[int, Columns],
    plan: LocalPlan,
    blocks: LocalBlocks,
    recorder: Recorder,
    limit: float,
) -> dict[int, jax.Array]:
    """Sends blocks to the devices that lack them; returns the leaves that are complete then."""
    executor = RelayExecutor(request, tables, limit)
    arrays: dict[int, jax.Array] = {}
    if plan.groups:
        await session.together("compile", recorder.timed("compile", executor.compile(plan.groups)))
        await session.together("connect", recorder.timed("connect", executor.connect(plan.groups)))
        await session.barrier("single_replica_pre_broadcast")
    for number, group in enumerate(plan.groups):
        exchange = recorder.timed("exchange", executor.exchange(group, blocks.blocks), group=number)
        arrays |= await session.together(f"exchange group {number + 1} of {len(plan.groups)}", exchange)
    for index in plan.complete:
        arrays[index] = executor.hand_over(index, blocks.blocks.pop(index))
    return arrays


def _tables(request: Request) -> dict[int, Columns]:
    """Returns the table of devices of each leaf that can be sent from process to process."""
    everywhere = set(range(jax.process_count()))
    by_kind: dict[tuple[int, tuple[tuple[str, ...], ...]], Columns] = {}
    tables = {}
    for index, leaf in enumerate(request.leaves):
        if leaf.mesh is None or leaf.direct_because or set(request.mesh_infos[leaf.mesh].processes) != everywhere:
            continue  # such leaves are read from storage
        if (leaf.mesh, leaf.spec) not in by_kind:
            by_kind[leaf.mesh, leaf.spec] = Columns(request.mesh_infos[leaf.mesh], leaf.spec)
        tables[index] = by_kind[leaf.mesh, leaf.spec]
    return tables


def _loaded_by_all(tables: Mapping[int, Columns], told: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, ...]]:
    """Returns what all devices of each leaf's table have loaded, from what the processes have told."""
    by_process = {process: holdings.unpack(message["loaded"]) for process, message in told.items()}
    loaded = {}
    for index, table in tables.items():
        columns = [0] * len(table.owners)
        for process, entries in by_process.items():
            for position, column in zip(table.of_process(process), entries[index], strict=True):
                columns[position] = column
        loaded[index] = tuple(columns)
    return loaded


def _must_exist(persistent: epath.Path | None, step: upstream.EmergencyStep) -> epath.Path:
    if persistent is None:
        raise FileNotFoundError(
            f"No steps found in either local or persistent storage when requesting restoration of step {step.step}: "
            "the hosts do not have all of it, and it is not in the persistent directory."
        )
    return persistent


def _limits(handler: BroadcastArrayHandler) -> Limits:
    return Limits(handler.options.stall_timeout, handler.options.timeout)
