"""The effects of a plan on this process: programs, reads, exchanges."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from orbax.checkpoint import type_handlers

from orbax_ext import mesh as mesh_lib
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan import Bundle, Group, LaneBatch, RestorePlan, Sum, piece_shape
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer import packing, reading
from orbax_ext.transfer.assembly import Assembler, assembler
from orbax_ext.transfer.exchange import Block, Exchange, GatherOp, Op, PackOp, SumOp, exchange_among
from orbax_ext.transfer.reading import OnDevices
from orbax_ext.upstream.array_handler import without_array_metadata

T = TypeVar("T")


class Execution:
    """What this process does for one plan, step by step.

    Whatever runs a program does so in a thread, and is waited for no longer than `limit` seconds. Where a peer has died
    in a collective, a program may have to wait for that; the event loop must not.
    """

    def __init__(self, handler: type_handlers.ArrayHandler, request: Request, plan: RestorePlan, limit: float) -> None:
        self.plan = plan
        self._handler = handler
        self._reader = without_array_metadata(handler)  # of groups, in which there are no typed PRNG keys
        self._request = request
        self._limit = limit
        self._exchanges: dict[tuple[int, tuple[str, ...]], Exchange] = {}
        self._assembled: dict[int, tuple[jax.Array, ...]] = {}  # leaves of which not all slices have arrived
        self._missing = Counter(leaf.slice.leaf for leaf in plan.leaves if leaf.slice is not None)

    async def compile(self) -> None:
        await self._in_thread(self._compile)

    def _compile(self) -> None:
        for group in self.plan.groups:
            self._exchange(group).compile(self._ops(group))
            for bundle in group.bundles:
                if isinstance(bundle, Sum):
                    for replica in self._other_replicas_here(group, bundle):
                        self._zeros_of(group, bundle, replica)
                for item in bundle.leaves:
                    if self.plan.leaves[item].slice is not None:
                        self._assembler(group, item)

    async def connect(self, *, measure: bool) -> float:
        """Opens the communicators; returns the bytes per second that this process receives by the first, if asked."""
        first, *others = dict.fromkeys(map(self._exchange, self.plan.groups))
        for exchange in others:
            await self._in_thread(exchange.connect)
        if measure:
            return await self._in_thread(first.measure)
        await self._in_thread(first.connect)
        return 0.0

    async def read(self, group: Group) -> list[OnDevices]:
        """A process's contribution to an exchange: for each bundle, a block on each of its devices."""
        wanted = [part for bundle in group.bundles for part in self._parts_here(group, bundle)]
        errands = [
            reading.Errand(self._wish(item), self.plan.leaves[item], sharding, block)
            for item, sharding, block in wanted
        ]
        arrays = await reading.read(self._reader, errands)

        def contributions() -> list[OnDevices]:
            read = zip(wanted, reading.as_blocks(arrays, errands), strict=True)
            by_item = {item: there for (item, _, _), there in read}
            return [self._contribution(group, bundle, by_item) for bundle in group.bundles]

        return await self._in_thread(contributions)

    async def read_direct(self, leaves: Collection[int]) -> dict[int, jax.Array]:
        """Leaves that are read the ordinary way."""
        if not leaves:
            return {}
        arrays = await type_handlers.ArrayHandler.deserialize(self._handler, *self._infos_and_args(leaves))
        return dict(zip(leaves, arrays, strict=True))

    def start_exchange(self, group: Group, contributions: list[OnDevices]) -> asyncio.Future[dict[int, jax.Array]]:
        """Starts an exchange; the future has the finished arrays by leaf index."""

        def exchange() -> list[dict[jax.Device, jax.Array]]:
            received = self._exchange(group).run(self._ops(group), contributions)
            contributions.clear()
            jax.block_until_ready([list(there.values()) for there in received])
            return received

        async def finish() -> dict[int, jax.Array]:
            received = await self._in_thread(exchange)

            def put_in_place() -> dict[int, jax.Array]:
                return self._finished(group, self._by_item(group, received))

            return await self._in_thread(put_in_place)

        return asyncio.ensure_future(finish())

    async def _in_thread(self, function: Callable[[], T]) -> T:
        wide = jax.config.jax_enable_x64  # of the caller's thread, which `with jax.enable_x64(True)` may have set

        @functools.wraps(function)
        def call() -> T:
            with jax.enable_x64(wide):
                return function()

        return await in_thread(call, limit=self._limit)

    # What a bundle asks for, by its kind.

    def _op(self, group: Group, bundle: Bundle) -> Op:
        if isinstance(bundle, Sum):
            return SumOp(self._block(bundle.leaf))
        if isinstance(bundle, LaneBatch):
            block, dims, sizes = self._block(bundle.leaves[0]), dict(bundle.splits), self._sizes(group)
            return GatherOp(
                block,
                piece_shape(block.shape, dims, sizes),
                tuple(sizes.values()),
                tuple(dims.get(axis) for axis in sizes),
            )
        return SumOp(Block((bundle.words,), jnp.dtype("uint32"))) if bundle.summed else PackOp(bundle.words)

    def _parts_here(self, group: Group, bundle: Bundle) -> list[tuple[int, NamedSharding, Block]]:
        """What this process reads for a bundle: (leaf, sharding to read it with, block on a device)."""
        if isinstance(bundle, LaneBatch):
            op = self._op(group, bundle)
            return [
                (leaf, self._split_sharding(group, bundle, lane), op.operand)
                for lane, leaf in enumerate(bundle.leaves)
                if self._is_here(mesh_lib.replica_mesh(self._mesh(group), bundle.lanes, lane))
            ]
        shares = {bundle.reader: bundle.leaves} if isinstance(bundle, Sum) else dict(enumerate(bundle.shares))
        return [
            (leaf, self._replica_sharding(group, leaf, replica), self._block(leaf))
            for replica in self._replicas_here(group)
            for leaf in shares.get(replica, ())
        ]

    def _contribution(self, group: Group, bundle: Bundle, read: dict[int, OnDevices]) -> OnDevices:
        if isinstance(bundle, Sum):
            found = dict(read.get(bundle.leaf, {}))
            for replica in self._other_replicas_here(group, bundle):
                found.update(self._zeros_of(group, bundle, replica).make())
            return found
        if isinstance(bundle, LaneBatch):
            return {device: data for leaf in bundle.leaves for device, data in read.get(leaf, {}).items()}
        table = mesh_lib.by_replica(self._mesh(group), group.axes)
        here = {device: row for row, devices in enumerate(table) for device in devices if _is_local(device)}
        return packing.pack(bundle, here, read, self.plan.leaves)

    def _by_item(self, group: Group, received: Sequence[OnDevices]) -> dict[int, OnDevices]:
        found: dict[int, OnDevices] = {}
        outputs = iter(received)
        for bundle in group.bundles:
            if isinstance(bundle, (Sum, LaneBatch)):
                found.update({leaf: next(outputs) for leaf in bundle.leaves})
            else:
                blocks = {leaf: self._block(leaf) for leaf in bundle.leaves}
                found.update(packing.unpack(bundle, next(outputs), blocks, self.plan.leaves))
        return found

    def _finished(self, group: Group, arrived: dict[int, OnDevices]) -> dict[int, jax.Array]:
        """The leaves that are complete with what has arrived; slices are put in their places until theirs is."""
        found = {}
        for item, there in arrived.items():
            part = self.plan.leaves[item].slice
            if part is None:
                found[item] = self._hand_over(item, there)
                continue
            into = self._assembler(group, item)
            whole = self._assembled.pop(part.leaf, None)
            whole = into.place(into.begin() if whole is None else whole, part, there)
            self._missing[part.leaf] -= 1
            if self._missing[part.leaf]:
                self._assembled[part.leaf] = whole
            else:
                found[part.leaf] = self._hand_over(part.leaf, into.finish(whole))
        return found

    # Looked up or made once.

    def _mesh(self, group: Group) -> Mesh:
        return self._request.meshes[group.mesh]

    def _sizes(self, group: Group) -> dict[str, int]:
        return {axis: self._mesh(group).shape[axis] for axis in group.axes}

    def _ops(self, group: Group) -> tuple[Op, ...]:
        return tuple(self._op(group, bundle) for bundle in group.bundles)

    def _exchange(self, group: Group) -> Exchange:
        key = (group.mesh, group.axes)
        if key not in self._exchanges:
            replicas = mesh_lib.by_replica(self._mesh(group), group.axes)
            self._exchanges[key] = exchange_among(tuple(map(tuple, replicas)))
        return self._exchanges[key]

    def _wish(self, item: int) -> LeafRequest:
        part = self.plan.leaves[item].slice
        return self._request.leaf_requests[item if part is None else part.leaf]

    def _block(self, item: int) -> Block:
        leaf = self.plan.leaves[item]
        return Block(leaf.block, jnp.dtype(leaf.dtype))

    def _assembler(self, group: Group, item: int) -> Assembler:
        leaf = self.plan.leaves[item]
        assert leaf.slice is not None
        here = tuple(device for device in self._mesh(group).devices.flat if _is_local(device))
        return assembler(self._block(leaf.slice.leaf), self._block(item), leaf.slice.dim, here)

    def _infos_and_args(self, leaves: Iterable[int]) -> tuple[list[Any], list[Any]]:
        chosen = [self._request.leaf_requests[leaf] for leaf in leaves]
        return [wish.info for wish in chosen], [wish.arg for wish in chosen]

    def _replica_sharding(self, group: Group, leaf: int, replica: int) -> NamedSharding:
        there = mesh_lib.replica_mesh(self._mesh(group), group.axes, replica)
        return mesh_lib.replica_sharding(self._wish(leaf).sharding, there)

    def _split_sharding(self, group: Group, bundle: LaneBatch, lane: int) -> NamedSharding:
        there = mesh_lib.replica_mesh(self._mesh(group), bundle.lanes, lane)
        return mesh_lib.split_sharding(self._wish(bundle.leaves[lane]).sharding, there, bundle.splits)

    def _zeros_of(self, group: Group, bundle: Sum, replica: int) -> reading.Zeros:
        shape, block = self.plan.leaves[bundle.leaf].shape, self._block(bundle.leaf)
        return reading.zeros(block, shape, self._replica_sharding(group, bundle.leaf, replica))

    def _replicas_here(self, group: Group) -> list[int]:
        table = mesh_lib.by_replica(self._mesh(group), group.axes)
        return [row for row, devices in enumerate(table) if any(map(_is_local, devices))]

    def _other_replicas_here(self, group: Group, bundle: Sum) -> list[int]:
        return [replica for replica in self._replicas_here(group) if replica != bundle.reader]

    def _is_here(self, mesh: Mesh) -> bool:
        return any(map(_is_local, mesh.devices.flat))

    def _hand_over(self, leaf: int, there: OnDevices) -> jax.Array:
        """The array with exactly the sharding asked for, around the buffers that the exchange made."""
        wish = self._request.leaf_requests[leaf]
        kind = wish.sharding.memory_kind
        buffers = [
            data
            if kind is None or kind == device.default_memory().kind
            else jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind))
            for device, data in there.items()
        ]
        return jax.make_array_from_single_device_arrays(wish.leaf.shape, wish.sharding, buffers)


def _is_local(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()
