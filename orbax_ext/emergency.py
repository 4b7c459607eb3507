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
from orbax_ext.plan.holders import Columns, Gaps, Loaded, LocalPlan, find_gaps, plan_relays
from orbax_ext.plan.memory import group_bytes
from orbax_ext.plan.planner import RestorePlan
from orbax_ext.plan.volumes import relay_traffic
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
        infos = upstream.param_infos(persistent, [step.names[index] for index in absent])
        restored = await handler.deserialize(infos, [step.args[index] for index in absent])
        arrays |= dict(zip(absent, restored, strict=True))
    return [arrays[index] for index in range(len(step.names))]


async def _restore_from_hosts(
    handler: BroadcastArrayHandler, step: upstream.EmergencyStep
) -> tuple[dict[int, jax.Array], epath.Path]:
    """Returns all leaves but those of which no host has anything, and where to read these."""
    options = handler.options
    with collect.recorded() as recorder, progress.shown(options.progress, recorder):
        async with arrival.failing_together(options):
            with recorder.span("describe"):
                local, persistent = await in_thread(step.find_local), await in_thread(step.find_persistent)
                stored = upstream.param_infos(persistent or _NOWHERE, step.names)
                request = given_request(stored, step.args)
                limit = memory_limit(options, request)
            with recorder.span("plan"):
                tables = _tables(request)
                recorder.planned(len(request.leaves), request.mesh_infos, _own_reads(request))
        with open_session("restore", _limits(handler), recorder.bytes_read, recorder.waited) as session:
            recorder.attach(session)
            agreed = await arrival.arrive(session, request.leaves, request.mesh_infos, options, limit)
            # Every process loads what it has, and all tell each other what that is.
            blocks = LocalBlocks(handler, request, tables)
            loading = recorder.timed("read", blocks.read(local, upstream.param_infos(local or _NOWHERE, step.names)))

            def tell() -> dict[str, Any]:
                return {"loaded": holdings.pack(blocks.loaded), "step": step.step, "stored": persistent is not None}

            _, told = await session.together_telling("read the local step", loading, tell)
            _check_same_step(told, session)
            loaded = _loaded_by_all(tables, told)
            gaps = find_gaps(request.leaves, tables, loaded)
            if gaps.leaves or gaps.blocks:
                # What nobody has is read from storage, each block once.
                _check_stored(step, told)
                _log_gaps(step, request, gaps, persistent)
                reading = recorder.timed("read", blocks.read_gaps(gaps.blocks, stored))
                await session.together("read what no host has", reading)
            with recorder.span("plan"):
                plan = plan_relays(request.leaves, tables, _filled(loaded, gaps), group_bytes(agreed))
                _record(recorder, request, tables, plan, gaps)
            arrays = await _exchange(session, request, tables, plan, blocks, recorder, options.stall_timeout)
            if options.verify and not gaps.leaves:
                with recorder.span("verify"):
                    await verify(session, request, [arrays[index] for index in range(len(arrays))])
            await collect.collect(session, recorder)
    return arrays, persistent or _NOWHERE


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


def _filled(loaded: Mapping[int, Loaded], gaps: Gaps) -> dict[int, Loaded]:
    """Returns what all devices have loaded once the gaps are filled, without the leaves of which nobody has any."""
    return {
        index: tuple(gaps.blocks.get(index, {}).get(at, column) for at, column in enumerate(columns))
        for index, columns in loaded.items()
        if index not in gaps.leaves
    }


def _own_reads(request: Request) -> RestorePlan:
    """Returns the first part of the work as a plan: every process reads for itself what it has."""
    return RestorePlan("local", tuple(request.leaves), (), dict.fromkeys(range(len(request.leaves)), "it is local"))


def _record(recorder: Recorder, request: Request, tables: Mapping[int, Columns], plan: LocalPlan, gaps: Gaps) -> None:
    """Notes for the report how each leaf is restored, and what this process sends and receives."""
    names = [leaf.name for leaf in request.leaves]
    strategy = {names[index]: "local: every host has it" for index in plan.complete}
    for index in (index for group in plan.groups for index in group.leaves):
        gap = " and storage" if index in gaps.blocks else ""
        strategy[names[index]] = f"local: from the hosts that have it{gap}"
    strategy |= {names[index]: "storage: no host has it" for index in sorted(gaps.leaves)}
    traffic = relay_traffic(plan.groups, tables, request.leaves, jax.process_index())
    recorder.planned(len(names), request.mesh_infos, _own_reads(request), strategy, traffic)


def _check_same_step(told: Mapping[int, Mapping[str, Any]], session: Session) -> None:
    steps = {process: {"step": str(message["step"])} for process, message in told.items()}
    arrival.check_agreement(steps, session.hosts)


def _check_stored(step: upstream.EmergencyStep, told: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises the error that Orbax raises, on all processes, unless storage has the step."""
    without = [process for process, message in told.items() if not message["stored"]]
    if without:
        raise FileNotFoundError(
            f"No steps found in either local or persistent storage when requesting restoration of step {step.step}: "
            f"the hosts do not have all of it, and {text.processes(without, {})} can't find it in persistent storage."
        )


def _log_gaps(step: upstream.EmergencyStep, request: Request, gaps: Gaps, persistent: epath.Path | None) -> None:
    names = [request.leaves[index].name for index in sorted({*gaps.leaves, *gaps.blocks})]
    logging.info(
        "orbax_ext: no host has all of %s of step %d; the rest is read from %s: %s",
        text.count(len(names), "leaf"),
        step.step,
        persistent,
        text.listing(names),
    )


def _limits(handler: BroadcastArrayHandler) -> Limits:
    return Limits(handler.options.stall_timeout, handler.options.timeout)
