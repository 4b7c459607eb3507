"""The benchmark, on a state so small that only its byte counts mean something."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

import orbax_ext
from bench import busy, first_step, first_step_work, network, running, steering, tables, work
from bench.changes import Change
from bench.network import Links
from bench.results import Result
from bench.scenarios import Scenario
from orbax_ext import lab

pytestmark = pytest.mark.once

SMALL = Scenario("small", "", Links(0, 0), (("dp", 4), ("tp", 2)), (256, 512), ("tp", None), leaves=16)

TINY = Scenario(
    "tiny", "two hosts", Links(800, 800), (("dp", 2), ("tp", 2)), (512, 1024), ("tp", None), leaves=8, hosts=2, repeat=1
)

shaped = pytest.mark.skipif(bool(network.why_not()), reason=f"no hosts with shaped links here: {network.why_not()}")


def run(scenario: Scenario, strategies: list[str], settings: running.Settings) -> list[Result]:
    return [*running.run(scenario, running.steps(scenario, [False], strategies, settings), settings)]


@shaped
def test_every_byte_is_counted_on_its_link() -> None:
    plain, spread = run(TINY, ["plain", "spread"], running.Settings())
    for result in (plain, spread):
        assert not result.failed
        assert result.exact
        assert result.processor_seconds > 0
    assert 2.0 <= plain.median("storage_bytes") / TINY.unique_bytes < 2.2
    assert 1.0 <= spread.median("storage_bytes") / TINY.unique_bytes < 1.2
    assert plain.median("fabric_bytes") < 0.1 * TINY.unique_bytes
    assert 1.0 <= spread.median("fabric_bytes") / spread.fabric_least < 1.2
    assert tables.table(TINY, [plain, spread]).count("| yes |") == 2


@shaped
def test_hosts_are_removed_afterwards(tmp_path: pathlib.Path) -> None:
    with network.Network(2, Links(100, 100), tmp_path) as net:
        assert namespaces() == {*map(net.namespace_of, range(2))}
    assert not namespaces()


@shaped
def test_a_link_stops_for_its_host_alone_and_goes_on_where_it_stopped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(16 << 20))
    dead = [Change(0, host=1, bytes=1 << 20)]
    with network.Network(2, Links(32, 32), tmp_path) as net:
        with steering.changing(net, dead, tmp_path / "started"):
            loads = [load(net, rank) for rank in range(2)]
            (tmp_path / "started").touch()
            assert loads[0].wait(30) == 0
            time.sleep(1.0)  # host 1 has as long again: it would have ended by now
            assert loads[1].poll() is None
            passed = net.bytes_passed()
            assert 1 << 20 <= passed[1] < 16 << 20 < passed[0]
        assert loads[1].wait(30) == 0
        assert net.bytes_served() == [16 << 20, 16 << 20]


@shaped
def test_a_slow_host_is_slow_from_the_start_and_far_storage_answers_late(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (2 << 20))
    with network.Network(2, Links(800, 800, latency=0.3), tmp_path) as net:
        with steering.changing(net, [Change(1, host=1)], tmp_path / "started"):
            slow, fast = load(net, 1), load(net, 0)
            started = time.monotonic()
            assert fast.wait(30) == 0
            assert time.monotonic() - started > 0.3
            assert slow.poll() is None
        assert slow.wait(30) == 0


def test_without_root_it_runs_on_loopback_and_the_other_code_is_that_of_the_other_checkout(
    tmp_path: pathlib.Path,
) -> None:
    package = pathlib.Path(orbax_ext.__file__).parent
    shutil.copytree(package, tmp_path / "orbax_ext", ignore=shutil.ignore_patterns("__pycache__", "patches"))
    version = tmp_path / "orbax_ext" / "version.py"
    version.write_text(version.read_text() + "\nOTHER = True\n")
    settings = running.Settings(unshaped="it needs root", auto_runs=1, before=tmp_path)
    both = dataclasses.replace(TINY, leaf=(64, 64), strategies=("auto", "auto before"))
    (result, before) = run(both, ["auto", "auto before"], settings)
    for each in (result, before):
        assert each.exact
        assert each.median("storage_bytes") == 0  # not known
    step = running.Step(TINY, False, "auto before", 1)
    with running.processes(step, running.Hosts(tmp_path), settings) as cluster:
        assert cluster.run(is_other_code) == [True, True]


def is_other_code() -> bool:
    """Returns whether the package has the line that the test has added, and the benchmark's functions are ours."""
    from orbax_ext import version

    return hasattr(version, "OTHER") and work.__file__.startswith(str(pathlib.Path(__file__).parents[2]))


def test_the_busy_program_ends_with_the_block() -> None:
    with busy.all_cores(30.0) as loops:
        assert len(loops) == os.cpu_count()
        assert [loop.poll() for loop in loops] == [None] * len(loops)
    assert all(loop.poll() is not None for loop in loops)


def test_the_busy_program_ends_by_itself() -> None:
    with busy.all_cores(0.1) as loops:
        assert [loop.wait(30) for loop in loops] == [0] * len(loops)


def load(net: network.Network, rank: int) -> subprocess.Popen[bytes]:
    """Starts to load a file on a host."""
    script = f"import urllib.request as r; assert r.urlopen('{net.url}/file', timeout=60).read()"
    return subprocess.Popen([*net.command_prefix(rank), sys.executable, "-S", "-c", script])


def namespaces() -> set[str]:
    folder = pathlib.Path("/var/run/netns")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if name.startswith(network.PREFIX) and "-h" in name}


def test_all_ways_to_the_first_step_have_the_same_loss(small_cluster: lab.Cluster, path: str) -> None:
    small_cluster.run(work.save, SMALL, path)
    losses = set()
    for way in first_step.WAYS:
        one_compiles = way == "restore_async"
        for one in small_cluster.run(first_step_work.first_step, SMALL, path, way, 5, "", one_compiles=one_compiles):
            assert one.ended - one.started > one.compiled > 0
            losses.add(one.loss)
    assert len(losses) == 1
    assert losses != {b""}
