"""Restores of Orbax's emergency checkpoint manager: from the hosts that still have the step, then from storage.

Every process loads what its own local directory has of the step. All tell each other what they have loaded, and
devices that lack a block receive it from devices that have it. Leaves of which no process has some block are read from
the persistent checkpoint of the same step.
"""

from __future__ import annotations

import asyncio
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
from orbax_ext.meeting.session import Limits, Session, open_session
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
from orbax_ext.transfer.held_blocks import taking
from orbax_ext.transfer.local_blocks import LocalBlocks
from orbax_ext.transfer.local_pipeline import LocalPipeline
from orbax_ext.transfer.memory import memory_limit
from orbax_ext.transfer.read_ahead import abandon
from orbax_ext.transfer.tiers import NOWHERE, LocalStep, StoredStep, check_tree
from orbax_ext.transfer.verify import Digests, verify
from orbax_ext.upstream import emergency as upstream
from orbax_ext.upstream.hooks import install

HOOKS = upstream.HOOKS


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
    with taking().running(settled=False):
        async with one_at_a_time(handler.limits):  # for both parts, so that no other restore comes between them
            return await _restore_in_turn(handler, step)


async def _restore_in_turn(handler: BroadcastArrayHandler, step: upstream.EmergencyStep) -> Sequence[jax.Array]:
    began = time.monotonic()
    arrays, stored = await _restore_from_hosts(handler, step)
    absent = [index for index in range(len(step.names)) if index not in arrays]
    if absent:
        ours = _for_absent(handler, time.monotonic() - began)
        infos, args = [stored[index] for index in absent], [step.args[index] for index in absent]
        with collect.continuing():
            restored = await ours.deserialize_in_turn(infos, args)
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


def _what_is_left(handler: BroadcastArrayHandler, spent: float) -> Limits:
    """Returns how long to wait, `spent` seconds after the beginning."""
    limits, timeout = handler.limits, handler.options.timeout
    if limits.total is None or timeout is None:
        return limits
    return dataclasses.replace(limits, total=min(limits.total, max(0.0, round(timeout - spent, 1))))


def _shortest(limits: Limits) -> float:
    return limits.stall if limits.total is None else min(limits.stall, limits.total)


async def _restore_from_hosts(
    handler: BroadcastArrayHandler, step: upstream.EmergencyStep
) -> tuple[dict[int, jax.Array], Sequence[Any]]:
    """Returns all leaves but those of which no host has anything, and descriptions of all leaves in storage.

    There are no descriptions if the hosts have everything: then persistent storage is not asked.
    """
    options, began = handler.options, time.monotonic()

    def limits() -> Limits:
        return _what_is_left(handler, time.monotonic() - began)

    with collect.recorded() as recorder, progress.shown(options.progress, recorder):
        async with arrival.failing_together(handler.limits):
            with recorder.span("describe"):
                local = await in_thread(step.find_local, limit=_shortest(limits()))
                # What the hosts have is in other places on each of them.
                request = given_request(upstream.param_infos(NOWHERE, step.names), step.args)
                limit = memory_limit(options, request)
            with recorder.span("plan"):
                tables = _tables(request)
        with open_session("restore", limits(), recorder.bytes_read, recorder.waited) as session:
            recorder.attach(session)
            stored = StoredStep(step, session, lambda: _shortest(limits()))
            blocks = LocalBlocks(handler, request, tables, stored.infos, options.stall_timeout, handler.with_limits)
            mine = LocalStep(blocks, step, local)
            looking = asyncio.ensure_future(mine.look())  # while others are still on their way
            try:
                agreed = await arrival.arrive(session, request.leaves, request.mesh_infos, options, limit)
                _, told = await session.together_telling("look at the local step", looking, mine.tell)
            finally:
                abandon(looking)
            _check_same_step(told, session)
            check_tree(step, told, session)
            restore = _HostRestore(session, request, tables, blocks, recorder, options.stall_timeout)
            have = mine.of_one_save(told, restore.have_everything)
            try:
                arrays = await restore.all_leaves(step, have, stored, group_bytes(agreed, "spread"))
            finally:
                blocks.log_damaged(local)
            if options.verify and arrays:  # what is read from storage after this is verified there
                with recorder.span("verify"), Digests(session, request) as found:
                    await verify(session, await stored.beside(request), arrays, found)
            await collect.collect(session, recorder)
    return arrays, stored.infos


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
        stored: StoredStep,
        group_bytes: int,
    ) -> dict[int, jax.Array]:
        """Returns all leaves but those of which no host has anything. `told` is what each process has.

        Leaves that turn out to be damaged on a host, and those that travel with them, are restored in another round,
        from what the hosts have loaded by then.
        """
        leaves = self.request.leaves
        arrays: dict[int, jax.Array] = {}
        absent = {index for index in range(len(leaves)) if index not in self.tables}
        while remaining := [index for index in self.tables if index not in arrays and index not in absent]:
            loaded = self._loaded(remaining, told)
            gaps = find_gaps(leaves, self.tables, loaded)
            absent |= gaps.leaves
            if absent or gaps.blocks:
                await stored.find()
                _log_gaps(step, [leaves[index].name for index in sorted({*absent, *gaps.blocks})], stored.directory)
            with self.recorder.span("plan"):
                plan = plan_relays(leaves, self.tables, fill(loaded, gaps), group_bytes)
                first = len(self.traffic)
                self._note(plan, gaps)
            arrays |= await self._one_round(plan, gaps, first)
            if damaged := [index for index in remaining if index not in arrays and index not in absent]:
                mine = {"have": holdings.pack({index: self.blocks.loaded[index] for index in damaged})}
                told = await in_thread(self.session.meet, "compare local steps", mine)
        if absent:
            await stored.find()
        return arrays

    def have_everything(self, told: Mapping[int, Mapping[str, Any]]) -> bool:
        """Returns whether some processes together have every block."""
        gaps = find_gaps(self.request.leaves, self.tables, self._loaded(list(self.tables), told))
        return not gaps.leaves and not gaps.blocks

    def _loaded(self, leaves: Sequence[int], told: Mapping[int, Mapping[str, Any]]) -> dict[int, Loaded]:
        """Returns what all devices of each leaf's table have."""
        by_process = {process: holdings.unpack(message["have"]) for process, message in told.items()}
        return deal_all(self.tables, leaves, by_process)

    async def _one_round(self, plan: LocalPlan, gaps: Gaps, first: int) -> dict[int, jax.Array]:
        """Follows a plan; returns its leaves but those that are damaged somewhere or travel with such a leaf."""
        session, blocks = self.session, self.blocks
        damaged: set[int] = set()
        context = self.request, self.tables, blocks, plan, gaps.blocks, self.recorder, self.limit, first
        with LocalPipeline(*context) as pipeline:
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
            self.strategy[leaves[index].name] = "local: from the hosts that have it"
        for index in gaps.blocks:
            self.strategy[leaves[index].name] = "local: from the hosts that have it and storage"
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


def _log_gaps(step: upstream.EmergencyStep, names: Sequence[str], persistent: epath.Path | None) -> None:
    logging.info(
        "orbax_ext: no host has all of %s of step %d; the rest is read from %s: %s",
        text.count(len(names), "leaf"),
        step.step,
        persistent,
        text.listing(names),
    )
