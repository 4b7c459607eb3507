"""Processes that fail, stop, die or disagree during a restore: every survivor ends and names the failed process.

Each fault is also put to stock Orbax's single-replica handler, on a cluster of its own, for bench/results/faults.md.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import pytest

from orbax_ext import lab
from orbax_ext.cli import main
from tests.faults import scenarios, table
from tests.faults.scenarios import OTHER, READER, STALL, Record
from tests.support import fault_injection, file_damage, states

HANGS_AFTER = 15.0  # seconds after which a stock restore counts as hanging, unless a healthy one is that slow here
_STOCK_LIMIT = 900.0  # seconds to wait for a stock cluster, and for its result
SOAK = int(os.environ.get("ORBAX_EXT_SOAK", "200"))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and the result that every process must have."""

    name: str
    scenario: Callable[[str, str], Record]
    expected: str  # outcome on every process that survives and restores
    culprit: int | None  # the process that the message names
    damage: Callable[[str], None] | None = None
    dies: tuple[int, ...] = ()
    stopped: int | None = None
    message: str = ""  # a part of the message
    seconds: float = 0.0  # that the fault takes by design
    before: str = ""  # the result before take-overs, if that differs, for the table


FAULTS = [
    Fault(
        "read error on the reader, strict_readers=True",
        scenarios.strict_read_error,
        "RestoreFailedError",
        READER,
        message="OSError: the disk is gone",
    ),
    Fault("read error on the reader", scenarios.read_error, "restored", None, before="all RestoreFailedError"),
    Fault("storage of the reader stalls", scenarios.reader_stalled, "restored", None, before="all RestoreTimeoutError"),
    Fault("corrupted chunk", scenarios.healthy, "RestoreFailedError", READER, file_damage.corrupt),
    Fault("truncated file", scenarios.healthy, "RestoreFailedError", READER, file_damage.truncate),
    Fault("missing file", scenarios.healthy, "RestoreFailedError", READER, file_damage.remove),
    Fault(
        "permission denied on the reader",
        scenarios.permission_denied,
        "restored",
        None,
        file_damage.lock,
        before="all RestoreFailedError",
    ),
    Fault("reader stopped past the limit", scenarios.reader_stopped, "RestoreTimeoutError", READER, stopped=READER),
    Fault(
        "reader slow but advancing, past the limit",
        scenarios.reader_slow,
        "restored",
        None,
        seconds=len(scenarios.STATE) * STALL / 2,
    ),
    Fault(
        "reader killed",
        scenarios.reader_killed,
        "RestoreTimeoutError",
        READER,
        dies=(READER,),
        seconds=fault_injection.SLOW,
    ),
    Fault(
        "another process killed",
        scenarios.non_reader_killed,
        "RestoreTimeoutError",
        OTHER,
        dies=(OTHER,),
        seconds=fault_injection.SLOW,
    ),
    Fault(
        "another process killed while all connect",
        scenarios.killed_while_connecting,
        "RestoreFailedError",
        OTHER,
        dies=(OTHER,),
    ),
    Fault(
        "another process killed in the exchange",
        scenarios.killed_in_exchange,
        "RestoreFailedError",
        OTHER,
        dies=(OTHER,),
    ),
    Fault("one process never calls restore", scenarios.never_calls, "RestoreTimeoutError", OTHER),
    Fault(
        "one process asks for another tree",
        scenarios.another_tree,
        "PlanMismatchError",
        OTHER,
        message="has 'layer3' as",
    ),
    Fault(
        "one process has other options",
        scenarios.other_options,
        "PlanMismatchError",
        OTHER,
        message="primary_replica_id: most have 1, but",
    ),
    Fault(
        "exception in the exchange of one process",
        scenarios.exception_in_exchange,
        "RestoreFailedError",
        OTHER,
        message="MemoryError",
    ),
    Fault("KeyboardInterrupt on the reader", scenarios.interrupted, "RestoreFailedError", READER),
]


class Arena:
    """A checkpoint, a cluster for orbax_ext, and two clusters where stock Orbax gets the same faults meanwhile."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.ours = lab.Cluster(4, 2, timeout=120)
        self._idle: queue.SimpleQueue[lab.Cluster] = queue.SimpleQueue()
        self._stock = [lab.Cluster(4, 2, timeout=120) for _ in range(2)]
        for cluster in self._stock:
            self._idle.put(cluster)
        self._pool = futures.ThreadPoolExecutor(len(self._stock))
        self._rows: list[tuple[str, str, str, futures.Future[str] | None]] = []
        self.saved = str(directory / "saved")
        self.ours.run(scenarios.save, self.saved)
        self.ours.run(scenarios.healthy, self.saved, "ours")
        self.healthy_seconds = max(r.seconds for r in self.ours.run(scenarios.healthy, self.saved, "ours"))
        self.patience = max(HANGS_AFTER, 4 * self.healthy_seconds)

    def copy(self, change: Callable[[str], None] | None) -> str:
        if change is None:
            return self.saved
        path = tempfile.mkdtemp(dir=self.directory)
        shutil.rmtree(path)
        shutil.copytree(self.saved, path)
        change(path)
        return path

    def run(self, fault: Fault, path: str) -> list[lab.Outcome]:
        """Returns the outcomes of our restore. `rows` waits for those of stock Orbax."""
        stock = self._pool.submit(self._run_stock, fault, path)
        run = self.ours.submit(fault.scenario, path, "ours")
        if fault.stopped is not None:
            threading.Thread(target=self._wake_later, args=(fault.stopped, path), daemon=True).start()
        outcomes = run.outcomes()
        self._rows.append((fault.name, table.summary(outcomes), fault.before, stock))
        return outcomes

    def _wake_later(self, rank: int, path: str) -> None:
        """Wakes a stopped process when the others have ended, or when the time for that is over."""
        marks = [scenarios.end_mark(path, "ours", other) for other in range(4) if other != rank]
        deadline = time.monotonic() + self.patience + STALL + 14
        while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.ours.signal(rank, signal.SIGCONT)

    def describe(self, outcome: lab.Outcome) -> str:
        """Returns an outcome of our restore, with the end of that process's log."""
        return "\n".join([str(outcome), *self.ours.log(outcome.rank).splitlines()[-60:]])

    def add_row(self, fault: str, ours: str) -> None:
        self._rows.append((fault, ours, "", None))

    def rows(self) -> list[table.Row]:
        return [
            table.Row(fault, "-" if stock is None else stock.result(_STOCK_LIMIT), ours, before)
            for fault, ours, before, stock in self._rows
        ]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for cluster in (self.ours, *self._stock):
            cluster.close()

    def _run_stock(self, fault: Fault, path: str) -> str:
        cluster = self._idle.get(timeout=_STOCK_LIMIT)
        try:
            return table.summary(cluster.submit(fault.scenario, path, "stock").outcomes(self.patience + fault.seconds))
        finally:
            self._idle.put(cluster)


@pytest.fixture(scope="module")
def arena(pytestconfig: pytest.Config) -> Iterator[Arena]:
    # Not in pytest's own directory: only its owner may enter that, and one fault reads as another user.
    with tempfile.TemporaryDirectory(prefix="orbax_ext_faults_") as directory:
        os.chmod(directory, 0o755)
        running = Arena(pathlib.Path(directory))
        try:
            yield running
            rows = running.rows()
        finally:
            running.close()
    release = importlib.metadata.version("orbax-checkpoint")
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\nOrbax {release}, stall_timeout={STALL:g}, hang = no end within {running.patience:.0f} s\n")
        print(table.table(rows))
    if os.environ.get("ORBAX_EXT_FAULTS_TABLE") == "write":
        table.write(rows, release)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_survivor_ends_in_time_and_names_the_failed_process(arena: Arena, fault: Fault) -> None:
    outcomes = arena.run(fault, arena.copy(fault.damage))
    for outcome in outcomes:
        if outcome.rank in fault.dies:
            assert outcome.state == "died", str(outcome)
            continue
        assert outcome.ok, arena.describe(outcome)
        record = outcome.value
        if record.outcome == "not called" or (fault.name.startswith("Keyboard") and outcome.rank == READER):
            continue
        assert record.outcome == fault.expected, record.message
        assert fault.message in record.message
        if fault.culprit is not None:
            assert re.search(rf"process {fault.culprit}\b", record.message), record.message
            if outcome.rank != fault.stopped:
                assert record.seconds < arena.healthy_seconds + fault.seconds + STALL + 10
    if not fault.dies:
        _next_restore_works(arena)


def test_a_process_that_restores_once_more_than_the_others_names_the_missing_ones(arena: Arena) -> None:
    outcomes = arena.run(Fault("one process calls it twice", scenarios.calls_twice, "", None), arena.saved)
    records = [outcome.value for outcome in outcomes]
    assert [record.outcome for record in records] == ["restored", "restored", "RestoreTimeoutError", "restored"]
    assert all(f"process {rank} (" in records[OTHER].message for rank in (0, 1, 3))
    _next_restore_works(arena)


def test_jax_ends_the_job_when_process_0_dies(arena: Arena) -> None:
    fault = Fault("process 0 killed, and the coordination service with it", scenarios.process_0_killed, "", 0)
    outcomes = arena.run(fault, arena.saved)
    assert outcomes[0].state == "died"
    assert all(outcome.state == "died" or "Restore" in outcome.value.outcome for outcome in outcomes[1:])


def test_verify_finds_a_chunk_with_the_content_of_another(arena: Arena) -> None:
    path = str(arena.directory / "plain files")
    arena.ours.run(scenarios.save, path, ocdbt=False)
    assert main.main(["verify", "--write", path]) == 0
    fault = Fault("chunk with the content of another, verify=True", scenarios.verified, "RestoreFailedError", READER)
    assert {record.outcome for record in arena.ours.run(scenarios.verified, path, "ours")} == {"restored"}
    file_damage.mix_up_chunks(path)
    for outcome in arena.run(fault, path):
        assert outcome.value.outcome == "RestoreFailedError"
        assert "leaf 'layer3', box [:, :]: digest" in outcome.value.message
        assert "1 (" in outcome.value.message
    assert main.main(["verify", path]) == 1


def test_restores_with_random_faults_leave_memory_and_coordination_keys_flat(arena: Arena) -> None:
    generator = random.Random(20240229)
    path = str(arena.directory / "soak")
    arena.ours.run(scenarios.save_soak, path)
    plan = [(generator.choice(scenarios.SOAK_FAULTS), generator.randrange(4)) for _ in range(SOAK)]
    batches = [plan[start : start + SOAK // 4] for start in range(0, SOAK, SOAK // 4)]
    megabytes = []
    for batch in batches:
        by_process = arena.ours.run(scenarios.soak, path, batch, timeout=60 + 15 * len(batch))
        for number, (fault, rank) in enumerate(batch):
            _check_soak(fault, rank, [records[number] for records in by_process])
        assert arena.ours.run(states.coordination_keys)[0] == []
        megabytes.append([records[-1].megabytes for records in by_process])
    growth = max(after - before for before, after in zip(megabytes[0], megabytes[-1], strict=True))
    arena.add_row(f"{SOAK} restores with random faults", f"as expected each time; memory +{growth:.0f} MB, no key left")
    assert growth < 60, megabytes


def _check_soak(fault: str, rank: int, records: list[Record]) -> None:
    expected = {
        "exchange": ("RestoreFailedError", rank),
        "another tree": ("PlanMismatchError", rank),
        "other options": ("PlanMismatchError", rank),
    }.get(fault)
    for record in records:
        if expected is None:
            assert record.outcome == "restored", (fault, record.message)
        else:
            assert record.outcome == expected[0], (fault, record.message)
            assert f"process {expected[1]} (" in record.message


def _next_restore_works(arena: Arena) -> None:
    after = arena.ours.run(scenarios.healthy, arena.saved, "ours")
    assert [record.outcome for record in after] == ["restored"] * 4, [record.message for record in after]


@pytest.mark.parametrize("release", table.load())
def test_the_page_has_the_faults_that_are_tested(release: str) -> None:
    assert {fault.name for fault in FAULTS} - {row.fault for row in table.load()[release]} == set()
