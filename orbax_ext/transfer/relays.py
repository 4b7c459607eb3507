"""Sends blocks from the devices that have loaded them to those that lack them, on this process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from orbax_ext.meeting.threads import result_of
from orbax_ext.plan.holders import ABSENT, Columns, Relay, RelayGroup
from orbax_ext.request import Request
from orbax_ext.transfer import packing
from orbax_ext.transfer.blocks import Block, DeviceBlocks
from orbax_ext.transfer.carriers import is_local
from orbax_ext.transfer.collectives import Exchange, RelayOp, exchange_among
from orbax_ext.transfer.programs import begin_in_thread, run_in_thread
from orbax_ext.transfer.reading import as_carried, hand_over, placed
from orbax_ext.transfer.turns import in_turn
from orbax_ext.upstream import runtime

T = TypeVar("T")


class RelayExecutor:
    """Runs the groups of a `LocalPlan`. Programs run in a thread, for at most `limit` seconds."""

    def __init__(self, request: Request, tables: Mapping[int, Columns], limit: float) -> None:
        self._request = request
        self._tables = tables
        self._limit = limit
        self._zeros: dict[tuple[jax.Device, Block], jax.Array] = {}
        # Held here, because `exchange_among` keeps only those that were used last.
        self._exchanges: dict[tuple[int, tuple[str, ...]], Exchange] = {}

    async def connect(self, groups: Sequence[RelayGroup]) -> None:
        """Opens the communicators that the groups need while all processes are together."""
        sums: dict[Exchange, bool] = {}
        for group in groups:
            exchange = self._exchange(group)
            sums[exchange] = sums.get(exchange, False) or bool(group.senders)

        def connect_all() -> None:
            with runtime.every_program_cached():
                for exchange, summed in sums.items():
                    exchange.connect_moves(summed)

        await self._in_thread(in_turn(connect_all, self._limit))

    async def compile(self, group: RelayGroup) -> None:
        """Compiles a program for each kind of relay, unless an earlier group or restore had the same one."""

        def compile_all() -> None:
            with runtime.every_program_cached():
                for relay in group.relays:
                    self._exchange(group).compile((self._op(group, relay),))

        await self._in_thread(compile_all)

    def start_exchange(
        self, group: RelayGroup, blocks: dict[int, DeviceBlocks]
    ) -> asyncio.Future[dict[int, jax.Array]]:
        """Starts an exchange; the future has the group's leaves.

        Takes the blocks that this process has loaded of them out of `blocks`.

        Groups may be under way together: the later one starts when the one before has arrived. JAX's CPU backend does
        not start programs of one and of several local devices in the order in which they are called, and two that
        share a communicator would take each other's data, or wait for each other for ever.
        """
        loaded = {leaf: dict(blocks.pop(leaf, {})) for leaf in group.leaves}
        # The thread starts here, so that this process takes part, in its turn, also if the restore is given up first.
        moving = begin_in_thread(in_turn(functools.partial(self._move, group, loaded), self._limit))

        async def finish() -> dict[int, jax.Array]:
            received = await result_of(moving, "an exchange", 2 * self._limit)  # the one before and this one
            return await self._in_thread(functools.partial(self._complete, group, loaded, received))

        return asyncio.ensure_future(finish())

    def _move(self, group: RelayGroup, loaded: Mapping[int, DeviceBlocks]) -> list[DeviceBlocks]:
        """Moves a group's operands; returns for each the blocks that this process's devices have received."""
        received: list[DeviceBlocks] = []
        failures: list[Exception] = []
        for relay in group.relays:
            try:
                received.append(self._start(group, relay, loaded))
            except Exception as error:  # the others are inside this relay, and will be inside those that follow
                failures.append(error)
        jax.block_until_ready([list(output.values()) for output in received])
        if failures:
            raise failures[0]
        return received

    def _complete(
        self, group: RelayGroup, loaded: Mapping[int, DeviceBlocks], received: Sequence[DeviceBlocks]
    ) -> dict[int, jax.Array]:
        """Returns a group's leaves, from what was loaded and what was received."""
        blocks = {leaf: dict(loaded[leaf]) for leaf in group.leaves}
        for relay, output in zip(group.relays, received, strict=True):
            for leaf, arrived in self._unpacked(relay, output).items():
                blocks[leaf] |= arrived
        return {leaf: self.hand_over(leaf, blocks[leaf]) for leaf in group.leaves}

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

    def _start(self, group: RelayGroup, relay: Relay, loaded: Mapping[int, DeviceBlocks]) -> DeviceBlocks:
        """Starts to move one operand; returns the blocks that this process's devices receive."""
        ops, exchange = (self._op(group, relay),), self._exchange(group)
        try:
            operand = self._operand(group, relay, loaded)
        except Exception:
            exchange.take_part(ops)
            raise
        (output,) = exchange.run(ops, [operand])
        if group.senders:
            return output
        devices = self._devices(group).ravel()
        receivers = {devices[receiver] for _, receiver in group.moves}
        return {device: block for device, block in output.items() if device in receivers}

    def _operand(self, group: RelayGroup, relay: Relay, loaded: Mapping[int, DeviceBlocks]) -> DeviceBlocks:
        """Returns what this process's devices hand in: what they have loaded, or zeros.

        Vectors are filled only where they are sent: blocks are copied to them from the device.
        """
        devices = self._devices(group)
        has = {
            device: column != ABSENT
            for device, column in zip(devices.ravel(), group.loaded, strict=True)
            if is_local(device)
        }
        if relay.words:
            leaves = self._request.leaves
            sending = {devices.ravel()[at] for at in group.sending}
            rows = {device: 0 if have and device in sending else 1 for device, have in has.items()}
            return placed([packing.Vectors(relay.pack, rows, leaves).filled(loaded)])[0]
        (leaf,) = relay.leaves
        block = self._block(relay)
        return {
            device: as_carried(loaded[leaf][device], device, block) if have else self._nothing(device, block, group)
            for device, have in has.items()
        }

    def _nothing(self, device: jax.Device, block: Block, group: RelayGroup) -> jax.Array:
        """Returns zeros; the same for all leaves, unless the program uses them up."""
        if (device, block) in self._zeros and not group.senders:
            return self._zeros[device, block]
        zeros = jax.device_put(np.zeros(block.carried_shape, block.carried_dtype), device)
        if not group.senders:
            self._zeros[device, block] = zeros
        return zeros

    def _unpacked(self, relay: Relay, output: DeviceBlocks) -> dict[int, DeviceBlocks]:
        if not relay.words:
            return {relay.leaves[0]: output}
        blocks = {leaf: _block(self._request, leaf) for leaf in relay.leaves}
        unpacked = packing.unpack(relay.pack, output, blocks, self._request.leaves)
        return dict(zip(unpacked, placed([*unpacked.values()]), strict=True))

    def _op(self, group: RelayGroup, relay: Relay) -> RelayOp:
        return RelayOp(self._block(relay), group.moves, group.senders, self._devices(group).size)

    def _block(self, relay: Relay) -> Block:
        return Block((relay.words,), jnp.dtype("uint32")) if relay.words else _block(self._request, relay.leaves[0])

    def _devices(self, group: RelayGroup) -> np.ndarray:
        return self._request.meshes[group.mesh].devices.ravel()[self._tables[group.leaves[0]].table]

    def _exchange(self, group: RelayGroup) -> Exchange:
        key = (group.mesh, group.axes)
        if key not in self._exchanges:
            self._exchanges[key] = exchange_among(tuple(map(tuple, self._devices(group))))
        return self._exchanges[key]

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await run_in_thread(function, self._limit)


def _block(request: Request, leaf: int) -> Block:
    return Block(request.leaves[leaf].block, jnp.dtype(request.leaves[leaf].dtype))


def _hashable(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)
