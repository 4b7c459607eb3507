"""The verdict of `orbax-ext check`, from what all processes measured. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orbax_ext import text as text_lib
from orbax_ext.plan import MeshInfo

_SLOW = 2.0  # times slower than the median process, or the other one: its storage is worth a look
_MUST_AGREE = ("orbax-ext", "orbax-checkpoint", "jax", "jaxlib")  # a restore refuses, or may not work, otherwise
_TOO_MUCH = 1.2  # times the stored bytes: the stored chunks do not fit the mesh
_LARGE = 1_000_000  # bytes above which the metadata, which is read too, does not matter
_MOST_NAMED = 4  # processes that a line names


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis, and whether the devices along it are on several processes and hosts."""

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
class ProcessResult:
    """One process and what it measured."""

    host: str
    devices: int
    versions: Mapping[str, str]
    bytes_read: int = 0
    bytes_received: int = 0  # from other processes
    seconds: float = 0.0
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds of "read", "exchange"...
    taken_over: tuple[str, ...] = ()  # why others read groups in its place

    @property
    def read_rate(self) -> float | None:
        """Bytes per second from storage; None if the process read nothing."""
        seconds = self.phases.get("read", self.seconds)
        return self.bytes_read / seconds if self.bytes_read and seconds > 0 else None

    @property
    def exchange_rate(self) -> float | None:
        """Bytes per second from other processes: a lower bound, because waiting counts too. None if there were none."""
        seconds = self.phases.get("exchange", 0.0)
        return self.bytes_received / seconds if self.bytes_received and seconds > 0 else None

    def plus(self, measured: Mapping[str, Any]) -> ProcessResult:
        """Returns the result with the measurements of one more restored item added."""
        more = measured["phases"]
        return dataclasses.replace(
            self,
            bytes_read=self.bytes_read + int(measured["bytes_read"]),
            bytes_received=self.bytes_received + int(measured["bytes_received"]),
            seconds=self.seconds + float(measured["seconds"]),
            taken_over=(*self.taken_over, *measured.get("taken_over", ())),
            phases={phase: self.phases.get(phase, 0.0) + more.get(phase, 0.0) for phase in {**self.phases, **more}},
        )


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """Everything that a verdict is based on."""

    path: str
    processes: Mapping[int, ProcessResult]
    launcher: str = ""  # who started the processes, and how they found each other
    launcher_advice: tuple[str, ...] = ()
    mesh: str = ""
    mesh_from: str = ""  # where the mesh comes from: "--mesh", "the checkpoint"...
    axes: tuple[Axis, ...] = ()
    stored_bytes: int = 0
    logical_bytes: int = 0
    leaves: int = 0
    travelled: int = 0  # leaves that were exchanged, not read by every process
    notes: tuple[str, ...] = ()
    report: str = ""
    error: str = ""  # why the restore failed; empty if it worked

    @property
    def ok(self) -> bool:
        return not self.error and not set(_MUST_AGREE) & self.differing_versions.keys()

    @property
    def bytes_read(self) -> int:
        return sum(process.bytes_read for process in self.processes.values())

    @property
    def differing_versions(self) -> dict[str, dict[str, list[int]]]:
        """By package and version, the processes that have it, for packages that differ between processes."""
        installed: dict[str, dict[str, list[int]]] = {}
        for number, process in self.processes.items():
            for package, version in process.versions.items():
                installed.setdefault(package, {}).setdefault(version, []).append(number)
        return {package: versions for package, versions in installed.items() if len(versions) > 1}

    def named(self, processes: Sequence[int]) -> str:
        hosts = {number: process.host for number, process in self.processes.items()}
        return text_lib.processes(processes, hosts, _MOST_NAMED)


def axes_of(mesh: MeshInfo, hosts: Mapping[int, str], shares: Mapping[str, float]) -> tuple[Axis, ...]:
    """Returns the axes of a mesh; `shares` are the shares of the bytes that are sharded over each."""
    numbers = {host: number for number, host in enumerate(sorted(set(hosts.values())))}
    by_host = dataclasses.replace(mesh, processes=tuple(numbers[hosts[process]] for process in mesh.processes))
    return tuple(
        Axis(name, size, shares.get(name, 0.0), mesh.crosses_processes((name,)), by_host.crosses_processes((name,)))
        for name, size in mesh.sizes.items()
    )


def changes(result: CheckResult) -> list[str]:
    """Returns what the user should change, most important first."""
    advice = []
    for package, versions in result.differing_versions.items():
        usual = max(versions, key=lambda version: len(versions[version]))
        others = [f"{version} on {result.named(who)}" for version, who in versions.items() if version != usual]
        advice.append(f"install {package} {usual} everywhere: it is {', '.join(others)}")
    devices = Counter(process.devices for process in result.processes.values())
    if len(devices) > 1:
        most_common = devices.most_common(1)[0][0]
        odd = [number for number, process in result.processes.items() if process.devices != most_common]
        advice.append(f"{result.named(odd)} should have {text_lib.count(most_common, 'device')} as the others do")
    advice += result.launcher_advice
    if len(result.processes) == 1 and not result.launcher_advice:
        advice.append(
            "this was one process: run it under srun, mpirun or Kubernetes as your job is, or with --local 4x8"
        )
    if result.error:
        if "NotACheckpointError" in result.error:
            advice.append(f"make {result.path} readable from every host, under the same path")
        return advice
    if len(result.processes) > 1 and result.axes and not result.travelled:
        advice += _why_nothing_travels(result.axes)
    if result.stored_bytes > _LARGE and result.bytes_read > _TOO_MUCH * result.stored_bytes:
        advice.append(
            f"{result.bytes_read / result.stored_bytes:.1f} times the stored bytes were read: `orbax-ext plan` shows "
            "which leaves are to blame"
        )
    return [*advice, *_slow_storage(result)]


def _why_nothing_travels(axes: Sequence[Axis]) -> list[str]:
    copies = [axis for axis in axes if axis.cut < 1 and axis.size > 1]
    if not copies:
        return ["nothing has copies on this mesh, so nothing can be read once and shared; if yours has, give --mesh"]
    if not any(axis.across_processes for axis in copies):
        inside = ", ".join(axis.name for axis in copies)
        return [f"all copies (along {inside}) are within a process: put {inside} before the sharded axes of the mesh"]
    return []


def _slow_storage(result: CheckResult) -> list[str]:
    if taken := {number: process.taken_over for number, process in result.processes.items() if process.taken_over}:
        whys = sorted({" ".join(why.split()) for every in taken.values() for why in every})
        groups = text_lib.count(sum(map(len, taken.values())), "group")
        return [
            f"look at the storage of {result.named([*taken])}: others read {groups} in its place "
            f"({text_lib.listing(whys, _MOST_NAMED)})"
        ]
    rates = {number: rate for number, process in result.processes.items() if (rate := process.read_rate)}
    if len(rates) < 2:
        return []
    usual = max(rates.values()) if len(rates) == 2 else statistics.median(rates.values())
    slow = [number for number, rate in rates.items() if rate * _SLOW < usual]
    if not slow or max(result.processes[number].phases.get("read", 0.0) for number in slow) < 1.0:
        return []
    speeds = f"{text_lib.size(min(rates.values()))}/s there, {text_lib.size(usual)}/s usually"
    return [f"look at the storage of {result.named(slow)}: {speeds}"]


def line(result: CheckResult) -> str:
    """Returns the verdict itself, in one line."""
    devices = max((process.devices for process in result.processes.values()), default=0)
    where = f"{text_lib.count(len(result.processes), 'process')} x {text_lib.count(devices, 'device')}"
    if result.error:
        on = f" on {where}" if result.processes else ""
        return f"verdict: FAILED{on}: {' '.join(result.error.split())}"
    if not result.ok:
        return f"verdict: FAILED on {where}: not all processes have the same versions"
    seconds = max(process.seconds for process in result.processes.values())
    return (
        f"verdict: OK, {text_lib.count(result.leaves, 'leaf')} ({text_lib.size(result.logical_bytes)}) restored "
        f"on {where} in {text_lib.seconds(seconds)}, all copies exact"
    )


def text(result: CheckResult) -> str:
    """Returns everything as text; the verdict is the last line."""
    lines = [f"check of {result.path}"]
    lines += [f"  {name:10} {value}" for name, value in _rows(result)]
    if result.report:
        lines += ["  report", *(f"    {row}" for row in result.report.splitlines())]
    lines += [f"  note       {note}" for note in result.notes]
    lines += [f"  to change  {change}" for change in changes(result)]
    return "\n".join([*lines, line(result)])


def data(result: CheckResult) -> dict[str, Any]:
    """Returns everything as plain data, for --json."""
    fields = dataclasses.asdict(result)
    for number, process in result.processes.items():
        fields["processes"][number] |= {"read_rate": process.read_rate, "exchange_rate": process.exchange_rate}
    return {"ok": result.ok, "verdict": line(result), **fields, "to_change": changes(result)}


def _rows(result: CheckResult) -> list[tuple[str, str]]:
    processes = list(result.processes.values())
    rows = [("launcher", result.launcher)] if result.launcher else []
    if processes:
        rows += [("processes", _where(processes)), *(("versions", row) for row in _version_rows(result))]
    if result.mesh:
        rows.append(("mesh", f"{result.mesh}, from {result.mesh_from}"))
        rows += [("", str(axis)) for axis in result.axes if axis.size > 1]
    if result.error or not any(process.seconds for process in processes):
        return rows
    return [*rows, ("storage", _storage(result)), ("exchange", _exchange(result))]


def _where(processes: Sequence[ProcessResult]) -> str:
    hosts = len({process.host for process in processes})
    counts = sorted({process.devices for process in processes})
    devices = text_lib.count(counts[0], "device") if len(counts) == 1 else f"{' or '.join(map(str, counts))} devices"
    return f"{len(processes):,} on {text_lib.count(hosts, 'host')}, {devices} each"


def _version_rows(result: CheckResult) -> list[str]:
    differing = result.differing_versions
    first = next(iter(result.processes.values())).versions
    same = ", ".join(f"{package} {version}" for package, version in first.items() if package not in differing)
    rows = [f"{same}: the same on all"] if same else []
    for package, versions in differing.items():
        shown = ", ".join(f"{version} on {text_lib.count(len(who), 'process')}" for version, who in versions.items())
        rows.append(f"{package} DIFFERS: {shown}")
    return rows


def _storage(result: CheckResult) -> str:
    readers = sum(process.bytes_read > 0 for process in result.processes.values())
    rates = [rate for process in result.processes.values() if (rate := process.read_rate)]
    times = ""
    if result.stored_bytes > _LARGE:
        times = f" ({result.bytes_read / result.stored_bytes:.2f} times what is stored)"
    speed = f", {text_lib.size(min(rates))}/s to {text_lib.size(max(rates))}/s each" if rates else ""
    return f"{text_lib.size(result.bytes_read)} read{times} by {text_lib.count(readers, 'process')}{speed}"


def _exchange(result: CheckResult) -> str:
    rates = [rate for process in result.processes.values() if (rate := process.exchange_rate)]
    if not rates:
        return "none: every process read what it needs"
    return f"{text_lib.count(result.travelled, 'leaf')}, at least {text_lib.size(min(rates))}/s into each process"
