"""BroadcastArrayHandler: a restore in eight steps, from the request to the arrays."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Unpack

import jax
from absl import logging
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext import options
from orbax_ext.meeting import arrival
from orbax_ext.meeting.refusal import refuse
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.meeting.threads import Turn, in_thread
from orbax_ext.options import Knobs, Options
from orbax_ext.placement import stacked_restore
from orbax_ext.plan import RestorePlan, anything_travels, choose_plan
from orbax_ext.plan.memory import group_bytes
from orbax_ext.plan.topology import describe, meshes_without
from orbax_ext.redact import redact
from orbax_ext.report import collect, progress
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.tables import direct_reasons
from orbax_ext.request import Request, make_request, may_concern_all_processes
from orbax_ext.storage import s3
from orbax_ext.storage.checkpoint.digest_files import identity
from orbax_ext.storage.connections import limit_silence_in
from orbax_ext.storage.stall import OthersTurn, while_bytes_arrive, while_storage_answers
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.garbage import collected_seldom
from orbax_ext.transfer.held_blocks import HeldBlocks, PlannedShare, taking
from orbax_ext.transfer.memory import memory_limit
from orbax_ext.transfer.pipeline import Pipeline
from orbax_ext.transfer.release import loss_explained
from orbax_ext.transfer.units_ahead import place_for
from orbax_ext.transfer.verify import Digests, verify, verify_alone
from orbax_ext.upstream.array_handler import (
    ArrayHandlerArguments,
    ArrayMetadataStore,
    array_handler_parameters,
    uses_pathways,
)
from orbax_ext.upstream.stored_arrays import checkpoint_of, places_of, with_request_concurrency

_turn = Turn()


class HandlerKnobs(Knobs, ArrayHandlerArguments, total=False):
    """Our knobs, and ArrayHandler's own keyword arguments."""


class BroadcastArrayHandler(type_handlers.SingleReplicaArrayHandler):
    """Orbax's `SingleReplicaArrayHandler`, fixed; a one-word replacement for it.

    Takes the knobs of `orbax_ext.options.Options` and ArrayHandler's own keyword arguments. Unlike the stock handler
    it accepts any restore args, and saves just as `ArrayHandler` does.
    """

    @options.with_knobs_in_signature
    def __init__(self, *stock: float | None, **knobs: Unpack[HandlerKnobs]) -> None:
        """Takes positional arguments as `SingleReplicaArrayHandler` does."""
        given = _by_name(stock, knobs)
        options.require_known(given, array_handler_parameters())
        self.options = Options(**{name: value for name, value in given.items() if name in options.FIELDS})
        # Without a store Orbax can't save through this handler: "No ArrayMetadata found".
        others: dict[str, Any] = {"array_metadata_store": ArrayMetadataStore()}
        others.update((name, value) for name, value in given.items() if name not in options.FIELDS)
        super().__init__(**{name: getattr(self.options, name) for name in options.STOCK_FIELDS}, **others)

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[jax.Array]:
        """Restores the leaves; see the base class."""
        if args is None:
            raise ValueError("Must provide ArrayRestoreArgs to restore as jax.Array.")
        if uses_pathways(self):
            return await super().deserialize(infos, args)
        # Where every process restores by itself, the others can't be told that this one was cancelled.
        by_itself = jax.process_count() > 1 and not may_concern_all_processes(args)
        with taking().running(settled=by_itself):
            async with one_at_a_time(self.limits):
                return await self.deserialize_in_turn(infos, args)

    async def deserialize_in_turn(self, infos: Sequence[Any], args: Sequence[Any]) -> Sequence[jax.Array]:
        """Does the same for a caller that is inside `one_at_a_time`."""
        with loss_explained(args):
            return await stacked_restore.restore(self, self.limits, infos, args, self._restore)

    def with_knobs(self, **knobs: Unpack[Knobs]) -> BroadcastArrayHandler:
        """Returns a handler like this one, but for some knobs."""
        handler = copy.copy(self)
        handler.options = dataclasses.replace(self.options, **knobs)
        return handler

    async def _restore(self, infos: Sequence[Any], args: Sequence[Any]) -> Sequence[jax.Array]:
        with (
            collect.recorded() as recorder,
            progress.shown(self.options.progress, recorder),
            contextlib.ExitStack() as stack,
        ):
            taking().recorder = recorder
            async with arrival.failing_together(self.limits, lambda: may_concern_all_processes(args)):
                # 1. Request: the leaves asked for, as plain data.
                with recorder.span("describe"):
                    if taking().held:
                        taking().saved = await self._saved(infos)
                    request = await self._request(infos, args)
                # 2. Plan: who reads which box, and how it travels. It is the same on every process.
                with recorder.span("plan"):
                    limit = memory_limit(self.options, request)
                    plan = self._plan(request, limit, recorder)
            stack.enter_context(collected_seldom(request.leaves))
            _log_meshes(request, self.options)
            _log_direct(request, plan)
            # Not `plan.groups`: that may depend on this process's memory, and all have to decide the same.
            if self._anything_travels(request) or request.concerns_all_processes:
                return await self._single_replica_deserialize_and_broadcast(request, plan, limit, recorder)
            if jax.process_count() > 1:
                taking().settle()
            with recorder.span("read"):
                reading = self._read_alone(request, plan, limit, recorder)
                arrays = await while_bytes_arrive(reading, self.limits, jax.process_index(), "read")
            if self.options.verify:
                with recorder.span("verify"):
                    await verify_alone(self.limits, request, arrays)
            return arrays

    async def _single_replica_deserialize_and_broadcast(
        self, request: Request, plan: RestorePlan, limit: int, recorder: Recorder
    ) -> Sequence[jax.Array]:
        with (
            open_session("restore", self.limits, recorder.bytes_read, recorder.waited) as session,
            Digests(session, request) as digests,
        ):
            recorder.attach(session)
            # 3. Meet: compare requests, and agree on the memory limit. Groups have to fit the smallest.
            asked = request.leaves, request.mesh_infos, self.options, limit, request.checkpoint
            agreed = await arrival.arrive(session, *asked)
            taking().settle(functools.partial(refuse, session))
            if agreed < limit:
                with recorder.span("plan"):
                    plan = self._plan(request, agreed, recorder)
            arrived = digests.begin if self.options.verify else None
            with Pipeline(self, request, plan, recorder, self.options, arrived, agreed) as pipeline:
                if plan.groups and not pipeline.boundary_moves:
                    # 4. Connect and compile while all are together, and while the first groups are being read.
                    # Who is cancelled in the arrival must not leave the others in a collective: all meet once before.
                    await session.together("begin", taking().come())
                    await session.together("connect", pipeline.connect())
                while not pipeline.done:
                    # 5. Read. Group k+1 is read while group k travels.
                    # 6. Meet again for each exchange: what one process can't read, all know and others read. The group
                    # before may still travel.
                    work = taking().unless_cancelled(pipeline.read())
                    _, told = await session.together_telling(pipeline.phase, work, pipeline.progress, pipeline.ask)
                    if not pipeline.agree(told, session.hosts):
                        continue
                    if not pipeline.connected:  # `auto` does so only now that there is something to exchange
                        await session.together("connect", pipeline.connect())
                    if not pipeline.course.ends.front:  # to later groups, all come from the meeting at once
                        await session.barrier("single_replica_pre_broadcast")
                    # 7. Exchange, as unsigned integers, in the scope of the replicas' mesh. It begins in its turn.
                    pipeline.start_exchange()
                taking().settle()  # all have agreed that everything is there
                # 8. Hand over exactly what was asked for, and report to process 0 where the time went.
                arrays = pipeline.arrays()
            if self.options.verify:
                with recorder.span("verify"):
                    await verify(session, request, dict(enumerate(arrays)), digests)
            await collect.collect(session, recorder)
        return arrays

    async def _read_alone(
        self, request: Request, plan: RestorePlan, limit: int, recorder: Recorder
    ) -> Sequence[jax.Array]:
        """Reads all leaves, without the other processes."""
        leaves = range(len(request.leaf_requests))
        executor = Executor(self, request, request.leaves, self.limits.stall, recorder.through_orbax, limit)
        arrays = await executor.read_direct(leaves, await taking().claim(request, plan).take_direct(leaves))
        return [arrays[leaf] for leaf in leaves]

    async def share(self, infos: Sequence[Any], args: Sequence[Any]) -> HeldBlocks:
        """Returns a place for what this process will read of these leaves, without a word with the other processes."""
        stall = self.options.stall_timeout
        saved = await in_thread(identity, checkpoint_of(infos[0]), limit=stall)
        stored_args = await while_storage_answers(stacked_restore.stored_args(self, infos, args), stall)
        request = await self._request(infos, stored_args)
        plan = self._plan(request, memory_limit(self.options, request), Recorder())
        return place_for(PlannedShare(self, request, plan, saved), stall, whole_groups=self.options.strategy == "auto")

    async def _saved(self, infos: Sequence[Any]) -> str | None:
        """Returns what differs between two saves under the same name; None if that can't be found out."""
        try:
            return await in_thread(identity, checkpoint_of(infos[0]), limit=self.options.stall_timeout)
        except Exception as error:  # then nothing is taken that was read ahead
            logging.warning("orbax_ext: can't tell which save this is: %s", redact(repr(error)))
            return None

    async def _request(self, infos: Sequence[Any], args: Sequence[Any]) -> Request:
        making = make_request(self, self.with_limits(infos), args)
        return await while_storage_answers(making, self.options.stall_timeout)

    def with_limits(self, infos: Sequence[Any]) -> list[Any]:
        """Returns descriptions of arrays that are read with this handler's limits on silence and on requests."""
        knobs = self.options
        limits = knobs.stall_seconds, knobs.stall_rate, knobs.stall_timeout
        limit_silence_in(places_of(infos), *limits, enabled=s3.silence_limits())
        return with_request_concurrency(infos, knobs.request_concurrency)

    @property
    def limits(self) -> Limits:
        """How long this handler waits, from now on."""
        return Limits(self.options.stall_timeout, taking().left(self.options.timeout), self.options.late_seconds)

    def _anything_travels(self, request: Request) -> bool:
        return anything_travels(request.leaves, request.mesh_infos, self.options, processes=jax.process_count())

    def _plan(self, request: Request, limit: int, recorder: Recorder) -> RestorePlan:
        plan = choose_plan(
            request.leaves,
            request.mesh_infos,
            self.options,
            processes=jax.process_count(),
            group_bytes=group_bytes(limit, self.options.strategy),
        )
        recorder.planned(len(request.leaves), request.mesh_infos, plan)
        return plan

    def _construct_single_replica_sharding(self, sharding: NamedSharding) -> NamedSharding:
        """Returns the sharding on this process's replica, as upstream's helper does, but with the mesh's axis types."""
        info = mesh_lib.describe(sharding.mesh)
        axes = [info.axis_names[self.replica_axis_index or 0]]
        table = mesh_lib.by_replica(sharding.mesh, axes)
        here = jax.process_index()
        replica = next(row for row, devices in enumerate(table) if any(d.process_index == here for d in devices))
        return mesh_lib.replica_sharding(sharding, mesh_lib.replica_mesh(sharding.mesh, axes, replica))


def _by_name(stock: Sequence[float | None], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns positional and keyword arguments by name; raises TypeError as Python does."""
    if len(stock) > len(options.STOCK_FIELDS):
        raise TypeError(f"takes at most {len(options.STOCK_FIELDS)} positional arguments; found {len(stock)}.")
    positional = dict(zip(options.STOCK_FIELDS, stock, strict=False))
    if twice := sorted(positional.keys() & knobs.keys()):
        raise TypeError(f"got multiple values for {', '.join(twice)}.")
    return {**positional, **knobs}


@contextlib.asynccontextmanager
async def one_at_a_time(limits: Limits) -> AsyncIterator[None]:
    """Lets the restores of one process take turns: two at once could meet another process's in the other order.

    Raises `RestoreTimeoutError` if the one whose turn it is does not advance; see `OthersTurn`.
    """
    loop = asyncio.get_running_loop()
    others_turn = OthersTurn(limits, jax.process_index())
    while not _turn.take(loop):
        await asyncio.sleep(0.01)
        others_turn.check()
    try:
        yield
    finally:
        _turn.give_back(loop)


def _log_meshes(request: Request, options: Options) -> None:
    lacking = meshes_without(request.mesh_infos, options.axes or ())
    if lacking:
        logging.info(
            "orbax_ext: the replica axis %s is not an axis of %s: leaves there travel along the axes that nothing is "
            "sharded over, or are read directly",
            ", ".join(map(repr, options.axes or ())),
            describe(lacking),
        )


def _log_direct(request: Request, plan: RestorePlan) -> None:
    if plan.direct:
        reasons = {request.leaves[index].name: reason for index, reason in plan.direct.items()}
        total = len(request.leaves)
        logging.info("orbax_ext: %d of %d leaves are read directly: %s", len(reasons), total, direct_reasons(reasons))
