"""BroadcastArrayHandler: a restore in eight steps, from the request to the arrays."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext import errors
from orbax_ext import mesh as mesh_lib
from orbax_ext.meeting import arrival
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.meeting.threads import Turn, in_thread
from orbax_ext.options import Options
from orbax_ext.placement import stacked_restore
from orbax_ext.plan import RestorePlan, anything_travels, choose_plan
from orbax_ext.plan.memory import group_bytes
from orbax_ext.report import collect, progress
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.tables import direct_reasons
from orbax_ext.request import Request, make_request
from orbax_ext.storage import counters
from orbax_ext.storage.stall import while_storage_answers
from orbax_ext.transfer.memory import memory_limit
from orbax_ext.transfer.pipeline import Pipeline
from orbax_ext.transfer.verify import verify, verify_alone
from orbax_ext.upstream.array_handler import ArrayMetadataStore, uses_pathways

_turn = Turn()


class BroadcastArrayHandler(type_handlers.SingleReplicaArrayHandler):
    """Orbax's `SingleReplicaArrayHandler`, fixed; a one-word replacement for it.

    Takes the knobs of `orbax_ext.options.Options` and ArrayHandler's own keyword arguments. Unlike the stock handler
    it accepts any restore args, and saves just as `ArrayHandler` does.
    """

    def __init__(
        self,
        replica_axis_index: int | None = None,
        primary_replica_id: int | None = 0,
        broadcast_memory_limit_bytes: int | None = None,
        broadcast_memory_scaling_factor: float | None = 0.75,
        *,
        replica_axis: str | int | Sequence[str | int] | None = None,
        strategy: Any = "auto",
        storage_gbps: float | None = None,
        fabric_gbps: float | None = None,
        stall_timeout: float = 300.0,
        timeout: float | None = None,
        verify: bool = False,
        progress: bool = True,
        **array_handler_kwargs: Any,
    ) -> None:
        self.options = Options(
            replica_axis=replica_axis,
            replica_axis_index=replica_axis_index,
            primary_replica_id=primary_replica_id,
            strategy=strategy,
            storage_gbps=storage_gbps,
            fabric_gbps=fabric_gbps,
            broadcast_memory_limit_bytes=broadcast_memory_limit_bytes,
            broadcast_memory_scaling_factor=broadcast_memory_scaling_factor,
            stall_timeout=stall_timeout,
            timeout=timeout,
            verify=verify,
            progress=progress,
        )
        # Without a store Orbax can't save through this handler: "No ArrayMetadata found".
        array_handler_kwargs.setdefault("array_metadata_store", ArrayMetadataStore())
        super().__init__(
            replica_axis_index=replica_axis_index,
            primary_replica_id=primary_replica_id,
            broadcast_memory_limit_bytes=broadcast_memory_limit_bytes,
            broadcast_memory_scaling_factor=broadcast_memory_scaling_factor,
            **array_handler_kwargs,
        )

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[jax.Array]:
        """Restores the leaves; see the base class."""
        if args is None:
            raise ValueError("Must provide ArrayRestoreArgs to restore as jax.Array.")
        if uses_pathways(self):
            return await super().deserialize(infos, args)
        async with _one_at_a_time(self.options.stall_timeout):
            return await stacked_restore.restore(self, infos, args, self._restore)

    async def _restore(self, infos: Sequence[Any], args: Sequence[Any]) -> Sequence[jax.Array]:
        with collect.recorded() as recorder, progress.shown(self.options.progress, recorder):
            async with arrival.failing_together(self.options):
                # 1. Request: the leaves asked for, as plain data.
                with recorder.span("describe"):
                    request = await while_storage_answers(make_request(self, infos, args), self.options.stall_timeout)
                # 2. Plan: who reads which box, and how it travels. It is the same on every process.
                with recorder.span("plan"):
                    limit = memory_limit(self.options, request)
                    plan = self._plan(request, limit, recorder)
            _log_direct(request, plan)
            # Not `plan.groups`: that may depend on this process's memory, and all have to decide the same.
            if self._anything_travels(request) or request.concerns_all_processes:
                return await self._single_replica_deserialize_and_broadcast(request, plan, limit, recorder)
            with recorder.span("read"):
                arrays = await type_handlers.ArrayHandler.deserialize(self, infos, args)
            if self.options.verify:
                with recorder.span("verify"):
                    await verify_alone(self._limits(), request, arrays)
            return arrays

    async def _single_replica_deserialize_and_broadcast(
        self, request: Request, plan: RestorePlan, limit: int, recorder: Recorder
    ) -> Sequence[jax.Array]:
        with open_session("restore", self._limits(), recorder.bytes_read, recorder.waited) as session:
            recorder.attach(session)
            # 3. Meet: compare requests, and agree on the memory limit. Groups have to fit the smallest.
            agreed = await arrival.arrive(session, request.leaves, request.mesh_infos, self.options, limit)
            if agreed < limit:
                with recorder.span("plan"):
                    plan = self._plan(request, agreed, recorder)
            with Pipeline(self, request, plan, recorder, self.options) as pipeline:
                if plan.groups:
                    # 4. Connect and compile while all are together, and while the first groups are being read.
                    _, rates = await session.together_telling("connect", pipeline.connect(), pipeline.rates)
                    pipeline.choose(rates)
                number = 0
                while number < len(pipeline.plan.groups):
                    # 5. Read. Group k+1 is read while group k travels.
                    # 6. Meet again before each exchange: one process's error is everybody's error.
                    phase = f"read group {number + 1} of {len(pipeline.plan.groups)}"
                    contributions = await session.together(phase, pipeline.read(number))
                    if number == 0:  # later groups need no barrier: all come from the meeting at once
                        await session.barrier("single_replica_pre_broadcast")
                    # 7. Exchange, as unsigned integers, in the scope of the replicas' mesh. This only starts it.
                    pipeline.start_exchange(number, contributions)
                    number += 1
                    if pipeline.may_choose_again(number):
                        pipeline.choose(await in_thread(session.meet, "pace", pipeline.rates()), done=number)
                # 8. Hand over exactly what was asked for, and report to process 0 where the time went.
                arrays = await session.together("hand over", pipeline.finish())
            if self.options.verify:
                with recorder.span("verify"):
                    await verify(session, request, arrays)
            await collect.collect(session, recorder)
        return arrays

    def _limits(self) -> Limits:
        return Limits(self.options.stall_timeout, self.options.timeout)

    def _anything_travels(self, request: Request) -> bool:
        return anything_travels(request.leaves, request.mesh_infos, self.options, processes=jax.process_count())

    def _plan(self, request: Request, limit: int, recorder: Recorder) -> RestorePlan:
        plan = choose_plan(
            request.leaves,
            request.mesh_infos,
            self.options,
            processes=jax.process_count(),
            group_bytes=group_bytes(limit),
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


@contextlib.asynccontextmanager
async def _one_at_a_time(stall: float) -> AsyncIterator[None]:
    """Lets the restores of one process take turns: two at once could meet another process's in the other order.

    Raises `RestoreTimeoutError` if the one whose turn it is reads nothing for `stall` seconds and does not end.
    """
    loop = asyncio.get_running_loop()
    bytes_read, since = counters.bytes_read(), time.monotonic()
    while not _turn.take(loop):
        await asyncio.sleep(0.01)
        if time.monotonic() - since > stall:
            if counters.bytes_read() == bytes_read:
                raise errors.RestoreTimeoutError(
                    f"another restore of this process has read nothing for {stall:g} s (stall_timeout), and this one "
                    "can't begin before it ends. Look for what it waits for in the log of this process.",
                    [jax.process_index()],
                    {},
                )
            bytes_read, since = counters.bytes_read(), time.monotonic()
    try:
        yield
    finally:
        _turn.give_back(loop)


def _log_direct(request: Request, plan: RestorePlan) -> None:
    if plan.direct:
        reasons = {request.leaves[index].name: reason for index, reason in plan.direct.items()}
        total = len(request.leaves)
        logging.info("orbax_ext: %d of %d leaves are read directly: %s", len(reasons), total, direct_reasons(reasons))
