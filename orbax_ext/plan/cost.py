"""What a plan costs: bytes over each link, and from them seconds. Pure.

Reading and exchanging overlap, so a restore takes as long as the slower of the two, and once through a group for the
other one:

    seconds = START + max(read, exchange) + min(read, exchange) / groups
    read = max(bytes of the busiest process / storage, bytes of all / storage in total) + arrays x PER_ARRAY
    exchange = bytes received by the busiest process / fabric + groups x PER_GROUP
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from orbax_ext.options import Options
from orbax_ext.plan.bundles import LaneBatch, Pack
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.planner import Group
from orbax_ext.plan.topology import MeshInfo

PER_ARRAY = 0.5e-3  # seconds to open and place one array
PER_GROUP = 30e-3  # seconds for a meeting and the start of an exchange
START = 0.5  # seconds to compile and connect

_WORD = 4
_SLOWER, _FASTER = 1 / 2, 3  # times as fast as storage that a fabric is, if it is clearly another link
_TINY_BYTES = 1 << 20  # of a process's share, below which nothing is gained by not reading all of it
_TINY_READS = 32


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes per second that one process gets while all work at once."""

    storage: float
    fabric: float
    storage_total: float = math.inf
    how: str = "given"  # or "measured"

    @classmethod
    def given(cls, options: Options) -> Rates | None:
        """Those that the user names, if any."""
        if options.storage_gbps is None or options.fabric_gbps is None:
            return None
        return cls(options.storage_gbps * 1e9 / 8, options.fabric_gbps * 1e9 / 8)

    @property
    def may_be_one_link(self) -> bool:
        """Whether they were measured one after the other and are about as fast, as if one link carried both."""
        return self.how == "measured" and _SLOWER * self.storage < self.fabric < _FASTER * self.storage

    def __str__(self) -> str:
        return f"storage {self.storage / 1e6:.0f} and fabric {self.fabric / 1e6:.0f} MB/s a process, {self.how}"


@dataclasses.dataclass(frozen=True)
class Load:
    """What a way of restoring asks of the processes."""

    read: int = 0  # bytes, of the process that reads most
    read_by_all: int = 0
    received: int = 0  # bytes, of the process that receives most
    reads: int = 0  # arrays, of the process that reads most of them
    groups: int = 0

    @property
    def is_tiny(self) -> bool:
        return self.read < _TINY_BYTES and self.reads < _TINY_READS

    def seconds(self, rates: Rates) -> float:
        """How long it takes."""
        read = max(self.read / rates.storage, self.read_by_all / rates.storage_total) + self.reads * PER_ARRAY
        if not self.groups:
            return read
        exchange = self.received / rates.fabric + self.groups * PER_GROUP
        return START + max(read, exchange) + min(read, exchange) / self.groups


class Costs:
    """The loads of a plan's groups, and of the same leaves read directly. Looks at each kind of leaf once."""

    def __init__(self, items: Sequence[Leaf], meshes: Sequence[MeshInfo], processes: int) -> None:
        self._items = items
        self._meshes = meshes
        self._processes = processes
        self._shares: dict[tuple[int, tuple[str, ...]], _Shares] = {}
        self._blocks: dict[tuple[int, frozenset[str]], np.ndarray] = {}

    def travelling(self, groups: Sequence[Group]) -> Load:
        """Of groups that are read once and exchanged."""
        read, received = np.zeros(self._processes), np.zeros(self._processes)
        reads = np.zeros(self._processes)
        for group in groups:
            shares = self._shares_of(group)
            for bundle in group.bundles:
                size = sum(self._items[item].block_bytes for item in bundle.leaves)
                if not isinstance(bundle, LaneBatch) and bundle.reader is not None:
                    mine = shares.of_replica(bundle.reader)
                    read += mine * size
                    reads += (mine > 0) * len(bundle.leaves)
                    received += shares.summed * size
                    continue
                read += shares.devices * size / shares.replicas
                if not isinstance(bundle, Pack):
                    reads += 1
                    received += shares.gathered * size / shares.replicas
                    continue
                reads += len(bundle.leaves) / shares.replicas
                received += (shares.summed if bundle.summed else shares.gathered) * bundle.words * _WORD
        return _load(read, received, reads, len(groups))

    def direct(self, leaves: Iterable[int]) -> Load:
        """Of leaves that every process reads for itself, each block once."""
        read, reads = np.zeros(self._processes), np.zeros(self._processes)
        for index in leaves:
            leaf = self._items[index]
            if leaf.mesh is None:
                read += math.prod(leaf.shape) * leaf.itemsize
                reads += 1
                continue
            held = self._blocks_of(leaf.mesh, leaf.used_axes)
            read += held * leaf.block_bytes
            reads += held > 0
        return _load(read, np.zeros(1), reads, 0)

    def _shares_of(self, group: Group) -> _Shares:
        key = (group.mesh, group.axes)
        if key not in self._shares:
            self._shares[key] = _Shares(self._meshes[group.mesh], group.axes, self._processes)
        return self._shares[key]

    def _blocks_of(self, mesh: int, used: frozenset[str]) -> np.ndarray:
        """How many different blocks each process holds of a leaf that uses these axes."""
        if (mesh, used) not in self._blocks:
            table = self._meshes[mesh].owners([axis for axis in self._meshes[mesh].axis_names if axis not in used])
            holders, _ = _holdings(table, self._processes)
            self._blocks[mesh, used] = np.bincount(holders, minlength=self._processes)[: self._processes]
        return self._blocks[mesh, used]


class _Shares:
    """For one mesh and its replica axes, how often a byte of each replica's piece is on a link of each process."""

    def __init__(self, mesh: MeshInfo, axes: Sequence[str], processes: int) -> None:
        self._table = mesh.owners(axes)
        self._processes = processes
        self.replicas = len(self._table)
        self.devices = np.bincount(self._table.ravel(), minlength=processes)[:processes]
        holders, here = _holdings(self._table, processes)
        # Every device gets every piece that is not on its own process.
        self.gathered = np.bincount(holders, here * (self.replicas - here), processes)[:processes]
        # A sum passes each block around twice, less what each device has already.
        crossing = np.where(here < self.replicas, here, 0)
        self.summed = np.bincount(holders, crossing, processes)[:processes] * 2 * (self.replicas - 1) / self.replicas

    def of_replica(self, replica: int) -> np.ndarray:
        """How many devices of one replica each process has."""
        return np.bincount(self._table[replica], minlength=self._processes)[: self._processes]


def _holdings(table: np.ndarray, processes: int) -> tuple[np.ndarray, np.ndarray]:
    """(process, number of its devices) for each column of the table and each process that has devices in it."""
    pairs, counts = np.unique(table + np.arange(table.shape[1]) * processes, return_counts=True)
    return pairs % processes, counts


def _load(read: np.ndarray, received: np.ndarray, reads: np.ndarray, groups: int) -> Load:
    return Load(int(read.max()), int(read.sum()), int(received.max()), int(reads.max()), groups)
