"""Leaves that arrive in parts: in slices, or with holes that others fill because a reader was late."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax

from orbax_ext.plan import Group, Slice
from orbax_ext.request import Request
from orbax_ext.transfer import reading
from orbax_ext.transfer.blocks import DeviceBlocks
from orbax_ext.transfer.carriers import PlannedLeaves, is_local
from orbax_ext.transfer.programs import Assembler, Words, make_assembler
from orbax_ext.transfer.reading import Blocks

Later = Sequence[tuple[int, Sequence[int]]]  # leaves with holes, and the slices that fill them


class Assembly:
    """Puts leaves together from what arrives, and hands over those that are complete."""

    def __init__(self, request: Request, leaves: PlannedLeaves) -> None:
        self._request = request
        self._leaves = leaves
        self._lock = threading.Lock()  # slices arrive from exchanges and from direct reads, in different threads
        self._begun: dict[int, Words] = {}
        self._missing: dict[int, set[int]] = {}  # of each leaf that arrives in parts: the parts, also itself
        for index, leaf in enumerate(leaves.leaves):
            if leaf.slice is not None:
                self._missing.setdefault(leaf.slice.leaf, set()).add(index)

    def compile(self, group: Group) -> None:
        """Compiles what puts the parts of a group in their places."""
        holed = {leaf for leaf, _ in group.later}
        for index in group.leaves:
            if index in holed or self._leaves.leaves[index].slice is not None:
                self._assembler(index)

    def completed_by(self, arrived: dict[int, Blocks], later: Later = ()) -> dict[int, jax.Array]:
        """Returns the leaves that are complete with leaves and slices that have arrived. `arrived` is emptied.

        `later` has leaves and slices with holes, and the slices that fill these, now or in a later exchange.
        """
        with self._lock:
            for index, slices in later:
                self._missing.setdefault(self._place(index).leaf, {index}).update(slices)
            indices = [index for index in arrived if self._place(index).leaf in self._missing]
            parts = dict(zip(indices, reading.placed([arrived.pop(index) for index in indices]), strict=True))
            complete = self._add(parts)
        requests = self._request.leaf_requests
        arrays = {leaf: reading.hand_over(requests[leaf], arrived.pop(leaf)) for leaf in [*arrived]}
        return arrays | {leaf: reading.hand_over(requests[leaf], blocks) for leaf, blocks in complete.items()}

    def _add(self, parts: dict[int, DeviceBlocks]) -> dict[int, DeviceBlocks]:
        complete: dict[int, DeviceBlocks] = {}
        for index, blocks in parts.items():
            rows = self._place(index)
            missing = self._missing[rows.leaf]
            if index not in missing:  # it has come before: others did not have it then
                continue
            assembler = self._assembler(index)
            whole = assembler.place(self._begun.pop(rows.leaf, None), rows, blocks)
            missing.remove(index)
            if missing:
                self._begun[rows.leaf] = whole
            else:
                complete[rows.leaf] = assembler.finish(whole)
        return complete

    def _place(self, index: int) -> Slice:
        """Returns the rows that a slice has in its leaf; a leaf has all of them."""
        leaf = self._leaves.leaves[index]
        return leaf.slice or Slice(index, 0, 0, leaf.block[0] if leaf.block else 1)

    def _assembler(self, index: int) -> Assembler:
        rows = self._place(index)
        mesh = self._leaves.request(index).sharding.mesh
        here = tuple(device for device in mesh.devices.flat if is_local(device))
        return make_assembler(self._leaves.block(rows.leaf), self._leaves.block(index), rows.dim, here)
