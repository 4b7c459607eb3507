"""BroadcastArrayHandler: a restore in which one replica reads and the others receive, told once from top to bottom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext import version
from orbax_ext.meeting import agreement, differences
from orbax_ext.meeting.arrival import failing_together, raise_failures
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import Turn, in_thread
from orbax_ext.options import Options
from orbax_ext.placement import stacked_restore
from orbax_ext.plan import RestorePlan, make_plan
from orbax_ext.plan.cost import Rates, with_cheapest
from orbax_ext.plan.planner import digest, largest_lane_batch
from orbax_ext.report import progress
from orbax_ext.report.collect import collect, recorded
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.report import summarize
from orbax_ext.request import Request, make_request
from orbax_ext.transfer import memory as budget_lib
from orbax_ext.transfer.executor import Execution
from orbax_ext.transfer.pipeline import Pipeline
from orbax_ext.transfer.verify import verify, verify_alone
from orbax_ext.upstream.array_handler import ArrayMetadataStore, uses_pathways

_turn = Turn()


class BroadcastArrayHandler(type_handlers.SingleReplicaArrayHandler):
    """Orbax's `SingleReplicaArrayHandler`, mended; a one-word replacement for it.

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
        async with _one_at_a_time():
            return await stacked_restore.restore(self, infos, args, self._restore)

    async def _restore(self, infos: Sequence[Any], args: Sequence[Any]) -> Sequence[jax.Array]:
        with recorded() as recorder, progress.shown(self.options.progress, recorder):
            async with failing_together(self.options):
                # 1. Describe.
                with recorder.span("describe"):
                    request = await make_request(self, infos, args)
                # 2. Plan. Every process comes to the same plan, so all take the same way from here.
                with recorder.span("plan"):
                    stack = largest_lane_batch(request.leaves, request.mesh_infos)
                    own_budget = budget_lib.choose(self.options, request.device_bytes, stack)
                    plan = self._plan(request, own_budget)
                recorder.planned(len(request.leaves), request.mesh_infos, plan)
            _log_direct(request, plan)
            if not plan.groups and not _concerns_all_processes(request):
                with recorder.span("read"):
                    arrays = await type_handlers.ArrayHandler.deserialize(self, infos, args)
                if self.options.verify:
                    with recorder.span("verify"):
                        await verify_alone(self._limits(), request, arrays)
                return arrays
            return await self._single_replica_deserialize_and_broadcast(request, own_budget, recorder)

    async def _single_replica_deserialize_and_broadcast(
        self, request: Request, own_budget: int, recorder: Recorder
    ) -> Sequence[jax.Array]:
        with open_session("restore", self._limits(), recorder.bytes_read, recorder.waited) as session:
            recorder.session = session
            # 3. Meet: is everybody here, do all want the same?
            agreed_budget = await self._arrive(session, request, own_budget)
            plan = self._plan(request, agreed_budget)
            recorder.planned(len(request.leaves), request.mesh_infos, plan)
            restore = Execution(self, request, plan, self.options.stall_timeout)
            # 4.-7. Connect and compile; then read groups while those before them travel.
            found = await Pipeline(session, request, restore, recorder, self.options).run()
            arrays = [found[index] for index in range(len(found))]
            if self.options.verify:
                with recorder.span("verify"):
                    await verify(session, request, arrays)
            # 8. Hand over, and tell process 0 where the time went.
            await collect(session, recorder)
        return arrays

    async def _arrive(self, session: Session, request: Request, own_budget: int) -> int:
        wanted = {
            "tree": f"{len(request.leaves)} leaves with digest {digest([request.leaves, request.mesh_infos])}",
            **{name: repr(value) for name, value in self.options.must_agree().items()},
            "orbax_ext version": version.__version__,
            "Orbax version": version.orbax_version(),
            "JAX version": jax.__version__,
        }
        arrivals = await in_thread(session.arrive, {"wanted": wanted, "budget": own_budget})
        raise_failures(arrivals, session.hosts)
        wanted_by_all = {process: payload["wanted"] for process, payload in arrivals.items()}
        details = {}
        if "tree" in agreement.differing(wanted_by_all):
            tree = differences.describe(request.leaves, request.mesh_infos)
            details = await differences.find(session, jax.process_index(), tree)
        agreement.check(wanted_by_all, session.hosts, details)
        return min(int(payload["budget"]) for payload in arrivals.values())

    def _limits(self) -> Limits:
        return Limits(self.options.stall_timeout, self.options.timeout)

    def _plan(self, request: Request, budget: int) -> RestorePlan:
        group = budget_lib.group_bytes(budget)
        processes = jax.process_count()
        plan = make_plan(request.leaves, request.mesh_infos, self.options, processes=processes, budget=group)
        if self.options.strategy != "auto":
            return plan
        return with_cheapest(plan, request.mesh_infos, processes, Rates.given(self.options))

    def _construct_single_replica_sharding(self, sharding: NamedSharding) -> NamedSharding:
        """Upstream's helper with the mesh's axis types kept: the part of a sharding in this process's replica."""
        info = mesh_lib.describe(sharding.mesh)
        axes = [info.axis_names[self.replica_axis_index or 0]]
        table = mesh_lib.by_replica(sharding.mesh, axes)
        here = jax.process_index()
        replica = next(row for row, devices in enumerate(table) if any(d.process_index == here for d in devices))
        return mesh_lib.replica_sharding(sharding, mesh_lib.replica_mesh(sharding.mesh, axes, replica))


@contextlib.asynccontextmanager
async def _one_at_a_time() -> AsyncIterator[None]:
    """Restores of one process take turns: two at once could meet another process's in the other order."""
    here = asyncio.get_running_loop()
    while not _turn.take(here):
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        _turn.give_back(here)


def _concerns_all_processes(request: Request) -> bool:
    """Whether a leaf lies on all processes of a job of several, so that one of them alone can't go on without it."""
    processes = set(range(jax.process_count()))
    return len(processes) > 1 and any(set(mesh.processes) == processes for mesh in request.mesh_infos)


def _log_direct(request: Request, plan: RestorePlan) -> None:
    if plan.direct:
        named = {request.leaf_requests[index].leaf.name: reason for index, reason in plan.direct.items()}
        logging.info(
            "orbax_ext: %d of %d leaves are read the ordinary way: %s",
            len(named),
            len(request.leaf_requests),
            summarize(named),
        )
