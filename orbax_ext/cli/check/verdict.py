"""What a rehearsed restore came to: facts of all processes in, one verdict out. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_ext import text as text_lib
from orbax_ext.plan import MeshInfo

_SLOW = 2.0  # times slower than the middle one: worth a look
_MUST_AGREE = ("orbax-ext", "orbax-checkpoint", "jax", "jaxlib")  # a restore refuses, or may not work, otherwise
_TOO_MUCH = 1.2  # times the stored bytes: chunks that do not fit
_LARGE = 1_000_000  # bytes above which metadata, which is read too, does not count


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis against the processes and hosts that its devices are on."""

    name: str
    size: int
    cut: float  # the share of the state's bytes that is sharded over it; the rest are copies
    across_processes: bool
    across_hosts: bool

    def __str__(self) -> str:
        within = "across processes" if self.across_processes else "within each process"
        part = f"shards of {self.cut:.0%} of the bytes, copies of the rest"
        what = "copies" if self.cut < 0.005 else "shards" if self.cut > 0.995 else part
        return f"{self.name}={self.size}: {what}, {'across hosts' if self.across_hosts else within}"


@dataclasses.dataclass(frozen=True)
class Told:
    """What one process has to say after its restore."""

    host: str
    devices: int
    versions: Mapping[str, str]
    bytes_read: int = 0
    bytes_received: int = 0  # from other processes
    seconds: float = 0.0
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)  # "read", "exchange"...


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that a verdict rests on."""

    path: str
    told: Mapping[int, Told]
    mesh: str = ""
    mesh_from: str = ""  # where the mesh comes from: "--mesh", "the checkpoint"...
    axes: tuple[Axis, ...] = ()
    stored_bytes: int = 0
    logical_bytes: int = 0
    leaves: int = 0
    travelled: int = 0  # leaves that were exchanged, not read by every process
    notes: tuple[str, ...] = ()
    report: str = ""
    error: str = ""  # what ended it; empty if it was restored

    @property
    def ok(self) -> bool:
        return not self.error and not versions_break(self.told)


def axes_against_processes(mesh: MeshInfo, hosts: Mapping[int, str], cut: Mapping[str, float]) -> tuple[Axis, ...]:
    """Where the devices along each axis are."""
    numbers = {host: number for number, host in enumerate(sorted(set(hosts.values())))}
    by_host = dataclasses.replace(mesh, processes=tuple(numbers[hosts[process]] for process in mesh.processes))
    return tuple(
        Axis(name, size, cut.get(name, 0.0), mesh.crosses_processes((name,)), by_host.crosses_processes((name,)))
        for name, size in mesh.sizes.items()
    )


def differing_versions(told: Mapping[int, Told]) -> dict[str, dict[str, list[int]]]:
    """By package, the processes that have each version, where not all have the same."""
    found: dict[str, dict[str, list[int]]] = {}
    for process, each in told.items():
        for package, version in each.versions.items():
            found.setdefault(package, {}).setdefault(version, []).append(process)
    return {package: versions for package, versions in found.items() if len(versions) > 1}


def versions_break(told: Mapping[int, Told]) -> bool:
    """Whether processes have different versions of what must be the same."""
    return any(package in _MUST_AGREE for package in differing_versions(told))


def changes(facts: Facts) -> list[str]:
    """What to change, most important first."""
    advice = []
    for package, versions in differing_versions(facts.told).items():
        most = max(versions, key=lambda version: len(versions[version]))
        others = [f"{version} on {_processes(p, facts)}" for version, p in versions.items() if version != most]
        advice.append(f"install {package} {most} everywhere: it is {', '.join(others)}")
    devices = Counter(each.devices for each in facts.told.values())
    if len(devices) > 1:
        usual = devices.most_common(1)[0][0]
        odd = [process for process, each in facts.told.items() if each.devices != usual]
        advice.append(f"{_processes(odd, facts)} should have {usual} devices as the others do")
    if len(facts.told) == 1:
        advice.append(
            "this was one process: run it under srun, mpirun or Kubernetes as your job is, or with --local 4x8"
        )
    if facts.error:
        if "NotACheckpointError" in facts.error:
            advice.append(f"make {facts.path} readable from every host, under the same path")
        return advice
    if len(facts.told) > 1 and facts.axes and not facts.travelled:
        advice += _why_nothing_travels(facts.axes)
    read = sum(each.bytes_read for each in facts.told.values())
    if facts.stored_bytes > _LARGE and read > _TOO_MUCH * facts.stored_bytes:
        advice.append(
            f"{read / facts.stored_bytes:.1f} times the stored bytes were read: see which leaves are to blame with "
            "`orbax-ext plan`"
        )
    advice += _slow(facts)
    return advice


def _why_nothing_travels(axes: Sequence[Axis]) -> list[str]:
    copies = [axis for axis in axes if axis.cut < 1 and axis.size > 1]
    if not copies:
        return ["nothing has copies on this mesh, so nothing can be read once and shared; if yours has, give --mesh"]
    if not any(axis.across_processes for axis in copies):
        inside = ", ".join(axis.name for axis in copies)
        return [f"all copies (along {inside}) are within a process: put {inside} before the sharded axes of the mesh"]
    return []


def _slow(facts: Facts) -> list[str]:
    rates = {process: rate for process, each in facts.told.items() if (rate := read_rate(each)) is not None}
    if len(rates) < 3:
        return []
    middle = statistics.median(rates.values())
    slow = [process for process, rate in rates.items() if rate * _SLOW < middle]
    if not slow or max(facts.told[process].phases.get("read", 0.0) for process in slow) < 1.0:
        return []
    rate = min(rates[process] for process in slow)
    return [
        f"look at the storage of {_processes(slow, facts)}: "
        f"{text_lib.size(rate)}/s there, {text_lib.size(middle)}/s usually"
    ]


def read_rate(told: Told) -> float | None:
    """Bytes per second from storage, of a process that read something."""
    took = told.phases.get("read", told.seconds)
    return told.bytes_read / took if told.bytes_read and took > 0 else None


def exchange_rate(told: Told) -> float | None:
    """Bytes per second that came over the interconnect; what was waited for counts too, so it is a lower bound."""
    took = told.phases.get("exchange", 0.0)
    return told.bytes_received / took if took > 0 and told.bytes_received else None


def _processes(processes: Sequence[int], facts: Facts, most: int = 4) -> str:
    named = [f"{process} ({facts.told[process].host})" for process in processes[:most]]
    more = f" and {len(processes) - most} more" if len(processes) > most else ""
    return f"process {', '.join(named)}{more}"


def line(facts: Facts) -> str:
    """The verdict itself."""
    where = f"{text_lib.count(len(facts.told), 'process')} x {max((t.devices for t in facts.told.values()), default=0)}"
    if facts.error:
        on = f" on {where} devices" if facts.told else ""
        return f"verdict: FAILED{on}: {' '.join(facts.error.split())}"
    if not facts.ok:
        return f"verdict: FAILED on {where} devices: not all processes have the same versions"
    took = max(each.seconds for each in facts.told.values())
    return (
        f"verdict: OK, {text_lib.count(facts.leaves, 'leaf')} ({text_lib.size(facts.logical_bytes)}) restored "
        f"on {where} devices in {text_lib.seconds(took)}, all copies exact"
    )


def text(facts: Facts) -> str:
    """Everything, as printed by process 0."""
    lines = [f"check of {facts.path}"]
    lines += [f"  {name:10} {value}" for name, value in _rows(facts)]
    if facts.report:
        lines += ["  report", *(f"    {row}" for row in facts.report.splitlines())]
    lines += [f"  note       {note}" for note in facts.notes]
    lines += [f"  to change  {change}" for change in changes(facts)]
    return "\n".join([*lines, line(facts)])


def _rows(facts: Facts) -> list[tuple[str, str]]:
    told = facts.told
    rows = []
    if told:
        hosts = len({each.host for each in told.values()})
        rows.append(("processes", f"{len(told)} on {text_lib.count(hosts, 'host')}, {_devices(told)} devices each"))
        differ = differing_versions(told)
        same = {p: v for p, v in next(iter(told.values())).versions.items() if p not in differ}
        rows.append(("versions", f"{', '.join(f'{p} {v}' for p, v in same.items())}: the same on all"))
        rows += [("versions", f"{p} DIFFERS: {_versions(versions)}") for p, versions in differ.items()]
    if facts.mesh:
        rows.append(("mesh", f"{facts.mesh}, from {facts.mesh_from}"))
        rows += [("", str(axis)) for axis in facts.axes if axis.size > 1]
    if facts.error or not any(each.seconds for each in told.values()):
        return rows
    rows.append(("storage", _storage(facts)))
    rates = [rate for each in told.values() if (rate := exchange_rate(each)) is not None]
    if rates:
        rows.append(
            (
                "exchange",
                f"{text_lib.count(facts.travelled, 'leaf')}, at least {text_lib.size(min(rates))}/s into each process",
            )
        )
    else:
        rows.append(("exchange", "none: every process read what it needs"))
    return rows


def _devices(told: Mapping[int, Told]) -> str:
    return " or ".join(str(count) for count in sorted({each.devices for each in told.values()}))


def _versions(versions: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{v} on {text_lib.count(len(p), 'process')}" for v, p in versions.items())


def _storage(facts: Facts) -> str:
    told = facts.told
    read = sum(each.bytes_read for each in told.values())
    readers = [each for each in told.values() if each.bytes_read]
    rates = [rate for each in told.values() if (rate := read_rate(each)) is not None]
    times = f" ({read / facts.stored_bytes:.2f} times what is stored)" if facts.stored_bytes > _LARGE else ""
    speed = f", {text_lib.size(min(rates))}/s to {text_lib.size(max(rates))}/s each" if rates else ""
    return f"{text_lib.size(read)} read{times} by {text_lib.count(len(readers), 'process')}{speed}"


def data(facts: Facts) -> dict[str, Any]:
    """Everything, for --json."""
    found = dataclasses.asdict(facts)
    found["processes"] = {
        str(process): {**dataclasses.asdict(each), "read_rate": read_rate(each), "exchange_rate": exchange_rate(each)}
        for process, each in facts.told.items()
    }
    del found["told"]
    return {"ok": facts.ok, "verdict": line(facts), **found, "to_change": changes(facts)}
