"""The benchmark's scenarios: a state, and the hosts and links it is restored on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from bench import limits
from bench.changes import Change, stops
from bench.network import Links
from bench.strategies import AUTO, BEFORE, PLAIN, SINGLE, SPREAD, STOCK, STOCK_OLDEST, USUAL, VERIFIED

MIB = 1 << 20
_ITEMSIZE = 2  # everything is bfloat16


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A state of equal leaves on a mesh over all devices, and the links of the hosts that hold it."""

    name: str
    about: str
    links: Links
    mesh: tuple[tuple[str, int], ...]  # (axis, size), over all devices of all hosts
    leaf: tuple[int, ...]
    spec: tuple[str | None, ...]
    leaves: int
    hosts: int = 4
    devices: int = 2
    replica_axis: str = "dp"
    local: bool = False  # on this machine's disk and loopback, without limited links
    replica_parallel: bool = True  # every replica saves a part of each shard; if False, one replica saves all of it
    chunk_bytes: int = 0  # at most this many in a stored chunk; 0: no limit but that of the shards
    changes: tuple[Change, ...] = ()  # of storage links, during the restore
    strategies: tuple[str, ...] = USUAL
    repeat: int = 2  # how often plain Orbax and `spread` are measured
    time_limit: float = 600.0  # seconds for one restore

    @property
    def unique_bytes(self) -> int:
        return self.leaves * math.prod(self.leaf) * _ITEMSIZE

    @property
    def replicas(self) -> int:
        return dict(self.mesh)[self.replica_axis]

    @property
    def host_bytes(self) -> int:
        """Returns the bytes that each host holds in the end."""
        on_devices = self.devices * self.hosts * self.unique_bytes
        shards = math.prod(size for axis, size in self.mesh if axis in self.spec)
        return on_devices // shards // self.hosts

    def measured(self, busy: bool) -> tuple[str, ...]:
        """Returns the strategies that are measured, quiet or busy."""
        if not busy:
            return self.strategies
        # Where links alone limit it, stock Orbax takes at least three times as long as the best: once is enough.
        # `auto` first: what takes much longer is ended (`estimates.most_busy`).
        fit = [AUTO, SPREAD, SINGLE, PLAIN] + [STOCK] * bool(self.local or self.links.storage_total)
        return tuple(strategy for strategy in fit if strategy in self.strategies)

    def limit(self) -> float:
        """Returns the seconds that the links need at least (`limits.FORMULA`); 0 if there are no limited links."""
        if self.local:
            return 0.0
        held = self.host_bytes // self._copies_on_a_host
        fabric = bytes_per_second(self.links.fabric)
        if self.links.shared:
            return held / fabric
        storage = min(bytes_per_second(self.links.storage), bytes_per_second(self.links.storage_total) / self.hosts)
        return limits.seconds_needed(self.unique_bytes, held, [storage] * self.hosts, fabric, self.changes)

    @property
    def _copies_on_a_host(self) -> int:
        """Returns how many devices of a host hold the same bytes, which need to cross its links only once."""
        inner = self.devices
        for axis, size in reversed(self.mesh):
            if axis in self.spec:
                inner = max(1, inner // size)
        return inner


def bytes_per_second(mbit: int) -> float:
    """Returns the rate of a link; 0 is unlimited."""
    return mbit * 1e6 / 8 if mbit else math.inf


def _dense(name: str, about: str, links: Links, mib: int = 128, **changes: object) -> Scenario:
    """Returns a scenario with leaves of 16 MiB on four hosts with two devices each: dp=4 x tp=2."""
    base = Scenario(name, about, links, (("dp", 4), ("tp", 2)), (2048, 4096), ("tp", None), mib // 16)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def _growing(hosts: int) -> Scenario:
    """Returns two replicas over some hosts; a host reads, holds and receives the same, however many there are."""
    mesh = (("dp", 2), ("fsdp", hosts))
    return _dense(
        f"hosts_{hosts}",
        f"{hosts} hosts, the same work for each",
        Links(80, 400),
        32 * hosts,
        mesh=mesh,
        spec=("fsdp", None),
        hosts=hosts,
    )


def scenarios() -> Iterator[Scenario]:
    """Yields all scenarios, the headline first."""
    usual = Links(320, 1600)
    every = (*USUAL, STOCK_OLDEST, VERIFIED, BEFORE)
    yield _dense("dense", "1 GiB in 64 leaves, the usual links", usual, 1024, strategies=every)
    half = "half of it, which the stock handler can restore here with its defaults"
    yield _dense("dense_half", half, usual, 512)
    yield _dense("dense_slow", "an eighth of it, on slower links", Links(80, 400), repeat=1)
    yield _dense("fast_storage", "storage faster than fabric", Links(400, 80))
    yield _dense("shared_link", "one link for storage and fabric", Links(0, 400, shared=True), 256)
    yield _dense("capped_storage", "storage with a total cap", Links(320, 1600, storage_total=320))
    yield _dense("balanced", "storage as fast as fabric: the best is a mixture", Links(200, 200), 256)
    yield from _turning()
    yield from _failing(usual)
    yield from _small(usual)
    yield _dense("huge_leaf", "one leaf of 128 MiB", usual, leaf=(8192, 8192), leaves=1)
    fsdp = (("dp", 2), ("fsdp", 4))
    yield _dense("fsdp_dp", "FSDP over two hosts, two replicas", usual, mesh=fsdp, spec=("fsdp", None))
    yield _dense("whole_shards", "one replica saved: a chunk is a whole shard", usual, replica_parallel=False)
    yield _dense("replica_chunks", "all replicas saved: a chunk is a part of a shard", usual)
    far = dataclasses.replace(usual, latency=0.04)
    yield _dense("far_storage", "storage answers 40 ms later, chunks of 256 KiB", far, 256, chunk_bytes=MIB // 4)
    yield from _local()
    for hosts in (2, 4, 8):
        yield _growing(hosts)


def _turning() -> Iterator[Scenario]:
    """Yields scenarios in which the rate of storage changes when half of the state's bytes have left it.

    Until then `spread` is the best in both, so that every strategy but plain Orbax gets as far.
    """
    half = 256 * MIB // 2
    slower = (Change(32, bytes=half),)
    yield _dense("turning_slow", "storage falls to a tenth half way", Links(320, 1600), 256, changes=slower)
    faster = (Change(400, bytes=half),)
    yield _dense("turning_fast", "storage becomes ten times as fast half way", Links(40, 200), 256, changes=faster)


def _failing(usual: Links) -> Iterator[Scenario]:
    """Yields scenarios like `dense` in which storage links of some hosts are slow, dead, or stop."""
    ours = (SINGLE, SPREAD, AUTO, BEFORE)  # plain Orbax takes 268 s with a slow host, and never ends with a dead link
    slow = (Change(usual.storage // 10, host=3),)
    yield _dense("slow_host", "one host has a tenth of the storage rate", usual, 1024, changes=slow, strategies=ours)
    yield _dense(
        "dead_link",
        "one host's storage link passes nothing from the second group on",
        usual,
        1024,
        changes=(Change(0, host=3, bytes=9 * MIB),),  # its part of the first group, and the metadata
        strategies=(SPREAD, AUTO, BEFORE),
        repeat=1,
        time_limit=120.0,
    )
    jitter = stops(4, usual.storage, seed=0)
    about = "every host's storage link stops for 2 s at random moments"
    yield _dense("jitter", about, usual, 1024, changes=jitter, strategies=(PLAIN, *ours))


def _small(usual: Links) -> Iterator[Scenario]:
    yield _dense("small_leaves", "5,000 leaves of 8 KiB", usual, leaf=(64, 64), leaves=5000)
    ours = (PLAIN, SPREAD, AUTO)
    yield _dense("many_leaves", "20,000 of them", usual, leaf=(64, 64), leaves=20_000, strategies=ours, repeat=1)


def _local() -> Iterator[Scenario]:
    """Yields scenarios on this machine's disk, in fact its page cache, and over loopback."""
    compared = (PLAIN, STOCK, SINGLE, SPREAD, AUTO)
    yield _dense(
        "demo_state",
        "32 MiB on the local disk, on the processes of the demo",
        Links(0, 0),
        local=True,
        mesh=(("dp", 4), ("tp", 8)),
        leaf=(1024, 1024),
        leaves=16,
        devices=8,
        strategies=compared,
        repeat=5,
    )
    yield _dense(
        "page_cache",
        "1 GiB on the local disk, two processes",
        Links(0, 0),
        1024,
        local=True,
        mesh=(("dp", 2), ("tp", 2)),
        hosts=2,
        strategies=(*compared, VERIFIED),
        repeat=5,
    )
