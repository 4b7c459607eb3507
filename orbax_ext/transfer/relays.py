"""Sends blocks from the devices that have loaded them to those that lack them, on this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from orbax_ext.plan.holders import ABSENT, Columns, Relay, RelayGroup
from orbax_ext.request import Request
from orbax_ext.transfer import packing
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.carriers import is_local
from orbax_ext.transfer.collectives import Exchange, RelayOp, exchange_among
from orbax_ext.transfer.executor import hand_over, run_in_thread
from orbax_ext.transfer.reading import as_carried

T = TypeVar("T")


class RelayExecutor:
    """Runs the groups of a `LocalPlan`. Programs run in a thread, for at most `limit` seconds."""

    def __init__(self, request: Request, tables: Mapping[int, Columns], limit: float) -> None:
        self._request = request
        self._tables = tables
        self._limit = limit

    async def connect(self, groups: Sequence[RelayGroup]) -> None:
        """Opens the communicators while all processes are together."""
        for exchange in dict.fromkeys(map(self._exchange, groups)):
            await self._in_thread(exchange.connect_all)

    async def compile(self, group: RelayGroup) -> None:
        """Compiles the group's program, unless an earlier group or restore had the same one."""

        def compile_one() -> None:
            self._exchange(group).compile(self._ops(group))

        await self._in_thread(compile_one)

    async def exchange(self, group: RelayGroup, blocks: dict[int, DeviceBlocks]) -> dict[int, jax.Array]:
        """Returns the group's leaves. Takes the blocks that this process has loaded of them out of `blocks`."""

        def run() -> dict[int, jax.Array]:
            self._exchange(group).compile(self._ops(group))  # unless it is compiled already
            loaded = {leaf: dict(blocks.pop(leaf, {})) for leaf in group.leaves}
            operands = [self._operand(group, relay, loaded) for relay in group.relays]
            received = self._exchange(group).run(self._ops(group), operands)
            operands.clear()
            jax.block_until_ready([list(output.values()) for output in received])
            for relay, output in zip(group.relays, received, strict=True):
                for leaf, arrived in self._unpacked(relay, output).items():
                    loaded[leaf] |= arrived
            return {leaf: self.hand_over(leaf, loaded[leaf]) for leaf in group.leaves}

        return await self._in_thread(run)

    def hand_over(self, leaf: int, blocks: DeviceBlocks) -> jax.Array:
        """Returns a leaf. Devices without a block get a copy from a device of this process that needs the same."""
        request = self._request.leaf_requests[leaf]
        indices = request.sharding.addressable_devices_indices_map(request.leaf.shape)
        by_index = {_hashable(indices[device]): block for device, block in blocks.items()}
        complete = {
            device: blocks[device] if device in blocks else jax.device_put(by_index[_hashable(index)], device)
            for device, index in indices.items()
        }
        return hand_over(request, complete)

    def _operand(self, group: RelayGroup, relay: Relay, loaded: Mapping[int, DeviceBlocks]) -> DeviceBlocks:
        """Returns what this process's devices hand in: what they have loaded, or zeros."""
        devices = self._devices(group)
        has = {
            device: column != ABSENT
            for device, column in zip(devices.ravel(), group.loaded, strict=True)
            if is_local(device)
        }
        if relay.words:
            leaves = self._request.leaves
            return packing.pack(relay.pack, {device: 0 if have else 1 for device, have in has.items()}, loaded, leaves)
        (leaf,) = relay.leaves
        block = self._block(relay)
        zeros = np.zeros(block.carried_shape, block.carried_dtype)
        return {
            device: as_carried(loaded[leaf][device], device, block) if have else jax.device_put(zeros, device)
            for device, have in has.items()
        }

    def _unpacked(self, relay: Relay, output: DeviceBlocks) -> dict[int, DeviceBlocks]:
        if not relay.words:
            return {relay.leaves[0]: output}
        blocks = {leaf: _block(self._request, leaf) for leaf in relay.leaves}
        return packing.unpack(relay.pack, output, blocks, self._request.leaves)

    def _ops(self, group: RelayGroup) -> tuple[RelayOp, ...]:
        devices = self._devices(group).size
        return tuple(RelayOp(self._block(relay), group.moves, group.senders, devices) for relay in group.relays)

    def _block(self, relay: Relay) -> Block:
        return Block((relay.words,), jnp.dtype("uint32")) if relay.words else _block(self._request, relay.leaves[0])

    def _devices(self, group: RelayGroup) -> np.ndarray:
        return self._request.meshes[group.mesh].devices.ravel()[self._tables[group.leaves[0]].table]

    def _exchange(self, group: RelayGroup) -> Exchange:
        return exchange_among(tuple(map(tuple, self._devices(group))))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await run_in_thread(function, self._limit)


def _block(request: Request, leaf: int) -> Block:
    return Block(request.leaves[leaf].block, jnp.dtype(request.leaves[leaf].dtype))


def _hashable(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)
