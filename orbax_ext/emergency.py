"""Restores of Orbax's emergency checkpoint manager: from the hosts that still have the step, then from storage.

Every process loads what its own local directory has of the step. All tell each other what they have loaded, and
devices that lack a block receive it from devices that have it. Leaves of which no process has some block are read from
the persistent checkpoint of the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath

from orbax_ext import errors, text
from orbax_ext.handler import BroadcastArrayHandler, one_at_a_time
from orbax_ext.meeting import arrival, holdings
from orbax_ext.meeting.session import Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import Contribution, failure_to_json, failures_from_json
from orbax_ext.options import Knobs
from orbax_ext.plan.holders import Columns, Loaded, LocalPlan, plan_relays
from orbax_ext.plan.loads import Gaps, deal_all, fill, find_gaps
from orbax_ext.plan.memory import group_bytes
from orbax_ext.plan.planner import RestorePlan
from orbax_ext.plan.volumes import Traffic, relay_traffic
from orbax_ext.report import collect, progress
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request, given_request
from orbax_ext.transfer.local_blocks import LocalBlocks
from orbax_ext.transfer.local_pipeline import LocalPipeline
from orbax_ext.transfer.memory import memory_limit
from orbax_ext.transfer.verify import Digests, verify
from orbax_ext.upstream import emergency as upstream
from orbax_ext.upstream.hooks import install

HOOKS = upstream.HOOKS
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
        arrivals = self._meet({"data": data})
        return [arrivals[process]["data"] for process in sorted(arrivals)]

    def share_failure(self, error: Exception) -> None:
        with contextlib.suppress(errors.RestoreTimeoutError):  # then this process's own error is more useful
            self._meet(failure_to_json(error))

    def _meet(self, mine: Contribution) -> dict[int, Contribution]:
        """Returns the contributions of all processes; raises `RestoreFailedError` if one of them has failed."""
        with open_session("emergency", self._handler().limits) as session:
            arrivals = session.arrive(mine)
            if failed := failures_from_json(arrivals, session.hosts, "list local steps"):
                raise errors.restore_failed(failed)
        return arrivals


async def _restore(handler: BroadcastArrayHandler, step: upstream.EmergencyStep) -> Sequence[jax.Array]:
    """Returns the leaves of a step, in the order of `step.names`."""
    async with one_at_a_time(handler.limits):
        began = time.monotonic()
        arrays, persistent = await _restore_from_hosts(handler, step)
    absent = [index for index in range(len(step.names)) if index not in arrays]
    if absent:
        infos = upstream.param_infos(persistent, [step.names[index] for index in absent])
        with collect.continuing():
            ours = _for_absent(handler, time.monotonic() - began)
            restored = await ours.deserialize(infos, [step.args[index] for index in absent])
        arrays |= dict(zip(absent, restored, strict=True))
    return [arrays[index] for index in range(len(step.names))]


def _for_absent(handler: BroadcastArrayHandler, spent: float) -> BroadcastArrayHandler:
    """Returns the handler for leaves of which no host has anything, `spent` seconds after the beginning.

    `auto` becomes `spread`: persistent storage is the slow tier here, and each byte is read once.
    """
    knobs: Knobs = {}
    if handler.options.strategy == "auto":
        knobs["strategy"] = "spread"
    if handler.options.timeout is not None:
        knobs["timeout"] = max(1.0, handler.options.timeout - spent)  # a handler refuses 0 and less
    return handler.with_knobs(**knobs)


async def _restore_from_hosts(
    handler: BroadcastArrayHandler, step: upstream.EmergencyStep
) -> tuple[dict[int, jax.Array], epath.Path]:
    """Returns all leaves but those of which no host has anything, and where to read these."""
    options = handler.options
    with collect.recorded() as recorder, progress.shown(options.progress, recorder):
        async with arrival.failing_together(handler.limits):
            with recorder.span("describe"):
                stall = options.stall_timeout
                local = await in_thread(step.find_local, limit=stall)
                persistent = await in_thread(step.find_persistent, limit=stall)
                stored = upstream.param_infos(persistent or _NOWHERE, step.names)
                request = given_request(stored, step.args)
                limit = memory_limit(options, request)
            with recorder.span("plan"):
                tables = _tables(request)
        with open_session("restore", handler.limits, recorder.bytes_read, recorder.waited) as session:
            recorder.attach(session)
            agreed = await arrival.arrive(session, request.leaves, request.mesh_infos, options, limit)
            blocks = LocalBlocks(handler, request, tables, stored, options.stall_timeout, handler.with_limits)
            looking = blocks.look(local, upstream.param_infos(local or _NOWHERE, step.names))
            described = {"step": step.step, "stored": persistent is not None}
            _, told = await session.together_telling("look at the local step", looking, lambda: described)
            _check_same_step(told, session)
            restore = _HostRestore(session, request, tables, blocks, recorder, options.stall_timeout)
            try:
                arrays = await restore.all_leaves(step, told, persistent, group_bytes(agreed, "spread"))
            finally:
                blocks.log_damaged(local)
            if options.verify and arrays:  # what is read from storage after this is verified there
                with recorder.span("verify"), Digests(session, request) as found:
                    await verify(session, request, arrays, found)
            await collect.collect(session, recorder)
    return arrays, persistent or _NOWHERE


@dataclasses.dataclass
class _HostRestore:
    """A restore from what the hosts have, during one session."""

    session: Session
    request: Request
    tables: Mapping[int, Columns]
    blocks: LocalBlocks
    recorder: Recorder
    limit: float  # seconds for a program
    strategy: dict[str, str] = dataclasses.field(default_factory=dict)  # for the report
    traffic: list[Traffic] = dataclasses.field(default_factory=list)  # for the report

    async def all_leaves(
        self,
        step: upstream.EmergencyStep,
        told: Mapping[int, Mapping[str, Any]],
        persistent: epath.Path | None,
        group_bytes: int,
    ) -> dict[int, jax.Array]:
        """Returns all leaves but those of which no host has anything.

        Leaves that turn out to be damaged on a host, and those that travel with them, are restored in another round,
        from what the hosts have loaded by then.
        """
        leaves = self.request.leaves
        arrays: dict[int, jax.Array] = {}
        absent = {index for index in range(len(leaves)) if index not in self.tables}
        have = self.blocks.present
        while remaining := [index for index in self.tables if index not in arrays and index not in absent]:
            loaded = await self._exchange_holdings({index: have[index] for index in remaining})
            gaps = find_gaps(leaves, self.tables, loaded)
            absent |= gaps.leaves
            if absent or gaps.blocks:
                _check_stored(step, told)
                _log_gaps(step, [leaves[index].name for index in sorted({*absent, *gaps.blocks})], persistent)
            with self.recorder.span("plan"):
                plan = plan_relays(leaves, self.tables, fill(loaded, gaps), group_bytes)
                first = len(self.traffic)
                self._note(plan, gaps)
            arrays |= await self._one_round(plan, gaps, first)
            have = self.blocks.loaded
        if absent:
            _check_stored(step, told)
        return arrays

    async def _exchange_holdings(self, mine: Mapping[int, Sequence[int]]) -> dict[int, Loaded]:
        """Returns what all devices of each leaf's table have."""
        told = await in_thread(self.session.meet, "compare local steps", {"have": holdings.pack(mine)})
        by_process = {process: holdings.unpack(message["have"]) for process, message in told.items()}
        return deal_all(self.tables, list(mine), by_process)

    async def _one_round(self, plan: LocalPlan, gaps: Gaps, first: int) -> dict[int, jax.Array]:
        """Follows a plan; returns its leaves but those that are damaged somewhere or travel with such a leaf."""
        session, blocks = self.session, self.blocks
        damaged: set[int] = set()
        context = self.request, self.tables, blocks, plan, gaps.blocks, self.recorder, self.limit, first
        with LocalPipeline(*context) as pipeline:
            if plan.groups:
                await session.together("connect", pipeline.connect())
            for number in range(len(plan.groups)):
                phase = f"read group {number + 1} of {len(plan.groups)}"
                _, told = await session.together_telling(phase, pipeline.load(number), blocks.tell_damaged)
                damaged |= _damaged(told)
                if number == 0:  # later groups need no barrier: all come from the meeting at once
                    await session.barrier("single_replica_pre_broadcast")
                pipeline.start_exchange(number, damaged)
            _, told = await session.together_telling("hand over", pipeline.finish(), blocks.tell_damaged)
            return pipeline.hand_over(damaged | _damaged(told))

    def _note(self, plan: LocalPlan, gaps: Gaps) -> None:
        """Notes for the report how each leaf is restored, and what this process sends and receives."""
        leaves = self.request.leaves
        self.strategy |= {leaves[index].name: "local: every host has it" for index in plan.complete}
        for index in (index for group in plan.groups for index in group.leaves):
            gap = " and storage" if index in gaps.blocks else ""
            self.strategy[leaves[index].name] = f"local: from the hosts that have it{gap}"
        self.strategy |= {leaves[index].name: "storage: no host has it" for index in sorted(gaps.leaves)}
        self.traffic += relay_traffic(plan.groups, self.tables, leaves, jax.process_index())
        # For the progress: every process reads for itself what it has.
        reads = RestorePlan("local", tuple(leaves), (), dict.fromkeys(self.tables, "it is local"))
        self.recorder.planned(len(leaves), self.request.mesh_infos, reads, dict(self.strategy), tuple(self.traffic))


def _damaged(told: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Returns the leaves that are damaged on some process."""
    return {leaf for message in told.values() if "damaged" in message for leaf in holdings.unpack(message["damaged"])}


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


def _log_gaps(step: upstream.EmergencyStep, names: Sequence[str], persistent: epath.Path | None) -> None:
    logging.info(
        "orbax_ext: no host has all of %s of step %d; the rest is read from %s: %s",
        text.count(len(names), "leaf"),
        step.step,
        persistent,
        text.listing(names),
    )
