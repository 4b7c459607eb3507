"""The benchmark's scenarios: a state, and the hosts and links it is restored on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from bench.network import Links

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
    replica_parallel: bool = True  # every replica saves a part of each shard; if False, one replica saves all of it
    repeat: int = 2

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

    def limit(self) -> float:
        """Returns the seconds that the links need at least to send every byte once and to each host what it holds."""
        held = self.host_bytes / self._copies_on_a_host
        fabric = bytes_per_second(self.links.fabric)
        if self.links.shared:
            return held / fabric
        storage = min(bytes_per_second(self.links.storage), bytes_per_second(self.links.storage_total) / self.hosts)
        return max(self.unique_bytes / self.hosts / storage, held / (storage + fabric))

    @property
    def _copies_on_a_host(self) -> int:
        """Returns how many devices of a host hold the same bytes, which need to cross its links only once."""
        inner = self.devices
        for axis, size in reversed(self.mesh):
            if axis in self.spec:
                inner = max(1, inner // size)
        return inner


LIMIT_FORMULA = (
    "limit = max(unique/hosts/storage, held/(storage + fabric)), where storage is at most a host's part of the cap; "
    "limit = held/link where one link carries both"
)


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
    yield _dense("dense", "1 GiB in 64 leaves, the usual links", usual, 1024, repeat=3)
    yield _dense("dense_half", "half of it, which the stock handler can restore here with its defaults", usual, 512)
    yield _dense("dense_slow", "a quarter of it, on slower links", Links(80, 400), 256, repeat=1)
    yield _dense("fast_storage", "storage faster than fabric", Links(400, 80), 256)
    yield _dense("shared_link", "one link for storage and fabric", Links(0, 400, shared=True), 1024)
    yield _dense("capped_storage", "storage with a total cap", Links(320, 1600, storage_total=320))
    yield _dense("small_leaves", "5,000 leaves of 8 KiB", usual, leaf=(64, 64), leaves=5000)
    yield _dense("huge_leaf", "one leaf of 128 MiB", usual, leaf=(8192, 8192), leaves=1)
    fsdp = (("dp", 2), ("fsdp", 4))
    yield _dense("fsdp_dp", "FSDP over two hosts, two replicas", usual, mesh=fsdp, spec=("fsdp", None))
    yield _dense("whole_shards", "one replica saved: a chunk is a whole shard", usual, replica_parallel=False)
    yield _dense("replica_chunks", "all replicas saved: a chunk is a part of a shard", usual)
    for hosts in (2, 4, 8):
        yield _growing(hosts)
