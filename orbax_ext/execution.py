"""The effects of a plan on this process: programs, reads, exchanges."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext import reading, wishes
from orbax_ext.exchange import Exchange
from orbax_ext.plan import Group, RestorePlan
from orbax_ext.waiting import in_thread


class Execution:
    """What this process does for one plan, step by step."""

    def __init__(
        self, handler: type_handlers.ArrayHandler, request: wishes.Wishes, plan: RestorePlan, primary: int
    ) -> None:
        self.plan = plan
        self._handler = handler
        self._request = request
        self._primary = primary
        self._exchanges: dict[tuple[int, tuple[str, ...]], Exchange] = {}
        self._zeros: dict[tuple[Any, ...], reading.Zeros] = {}

    async def compile(self) -> None:
        for group in self.plan.groups:
            self._exchange(group).compile(self._blocks(group))
            for replica in self._replicas_here(group):
                if replica != self._primary:
                    self._zeros_of(group, replica)

    async def connect(self, limit: float) -> None:
        for exchange in self._exchanges.values():
            await in_thread(exchange.connect, limit=limit)

    async def read(self, group: Group) -> list[dict[jax.Device, jax.Array]]:
        """A process's contribution to an exchange: what it read, and zeros on its devices in other replicas."""
        found: list[dict[jax.Device, jax.Array]] = [{} for _ in group.leaves]
        chosen = [self._request.wishes[index] for index in group.leaves]
        for replica in self._replicas_here(group):
            if replica == self._primary:
                shardings = self._shardings(group, replica)
                infos, args = [wish.info for wish in chosen], [wish.arg for wish in chosen]
                parts = await reading.read(self._handler, infos, args, shardings, self._blocks(group))
            else:
                parts = self._zeros_of(group, replica).make()
            for leaf, part in zip(found, parts, strict=True):
                leaf.update(part)
        return found

    async def read_direct(self) -> dict[int, jax.Array]:
        """The leaves that are read the ordinary way."""
        indices = list(self.plan.direct)
        if not indices:
            return {}
        chosen = [self._request.wishes[index] for index in indices]
        infos, args = [wish.info for wish in chosen], [wish.arg for wish in chosen]
        arrays = await type_handlers.ArrayHandler.deserialize(self._handler, infos, args)
        return dict(zip(indices, arrays, strict=True))

    def start_exchange(
        self, group: Group, contributions: list[dict[jax.Device, jax.Array]], limit: float
    ) -> asyncio.Future[dict[int, jax.Array]]:
        """Starts an exchange; the future has the finished arrays by leaf index."""

        async def finish() -> dict[int, jax.Array]:
            received = self._exchange(group).run(self._blocks(group), contributions)
            contributions.clear()
            arrays = {
                index: _hand_over(self._request.wishes[index], there)
                for index, there in zip(group.leaves, received, strict=True)
            }
            await in_thread(jax.block_until_ready, list(arrays.values()), limit=limit)
            return arrays

        return asyncio.ensure_future(finish())

    def _mesh(self, group: Group) -> Mesh:
        return self._request.meshes[group.mesh]

    def _exchange(self, group: Group) -> Exchange:
        key = (group.mesh, group.axes)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(mesh_lib.by_replica(self._mesh(group), group.axes))
        return self._exchanges[key]

    def _blocks(self, group: Group) -> tuple[Any, ...]:
        return tuple(self._request.wishes[index].block for index in group.leaves)

    def _shardings(self, group: Group, replica: int) -> list[NamedSharding]:
        there = mesh_lib.replica_mesh(self._mesh(group), group.axes, replica)
        return [mesh_lib.replica_sharding(self._request.wishes[index].sharding, there) for index in group.leaves]

    def _zeros_of(self, group: Group, replica: int) -> reading.Zeros:
        shapes = [self._request.wishes[index].leaf.shape for index in group.leaves]
        shardings = self._shardings(group, replica)
        key = (self._blocks(group), tuple(shapes), tuple(shardings))
        if key not in self._zeros:
            self._zeros[key] = reading.Zeros(self._blocks(group), shapes, shardings)
        return self._zeros[key]

    def _replicas_here(self, group: Group) -> list[int]:
        here = jax.process_index()
        table = mesh_lib.by_replica(self._mesh(group), group.axes)
        return [row for row, devices in enumerate(table) if any(d.process_index == here for d in devices)]


def _hand_over(wish: wishes.Wish, there: dict[jax.Device, jax.Array]) -> jax.Array:
    """The array with exactly the sharding asked for, around the buffers that the exchange made."""
    kind = wish.sharding.memory_kind
    buffers = []
    for device, data in there.items():
        if kind is not None and kind != device.default_memory().kind:
            data = jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind))
        buffers.append(data)
    return jax.make_array_from_single_device_arrays(wish.leaf.shape, wish.sharding, buffers)
