"""Where `auto` divides a restore, tried on simulated processes."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.plan.boundary import (
    Ends,
    GroupBytes,
    Progress,
    bytes_of_groups,
    meet_again_after,
    next_boundary,
    part_of_first_share,
    shares_ahead,
)
from orbax_ext.plan.memory import AHEAD
from orbax_ext.plan.planner import make_plan

pytestmark = pytest.mark.once

MIB = 1 << 20
IDLE = Progress(begun=3, direct=0, ready=True, idle=True, waiting=0.3, storage=1.0, fabric=1.0)
GROUP = GroupBytes(share=25, direct=100, link=75)


@dataclasses.dataclass
class Process:
    """A process that reads at some rate. Storage serves one read at a time.

    A group from the back begins when no share is being read or waits. One that has begun is read to its end.
    """

    storage: float  # bytes per second
    compiled: float  # when its programs are
    turns: float = math.inf  # when the rate falls to a tenth
    shares: list[float] = dataclasses.field(default_factory=list)  # when the reading of each ends
    sizes: list[int] = dataclasses.field(default_factory=list)  # of the groups from the back
    back: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # when each begins and ends

    @property
    def free(self) -> float:
        """When storage is free, if nothing is added."""
        return max([0.0, *self.shares, *(end for _, end in self.back)])

    def read(self, now: float, shares: Sequence[int] = (), back: Sequence[int] = ()) -> None:
        """Adds reads, of these sizes, to those that are under way or wait."""
        self.sizes += back
        begun = [(start, end) for start, end in self.back if start < now]
        self.back = begun
        for size in shares:
            self.shares.append(self.end(max(now, self.free), size))
        for size in self.sizes[len(begun) :]:
            start = max(now, self.free)
            self.back.append((start, self.end(start, size)))

    def end(self, start: float, size: int) -> float:
        """Returns when the reading of so many bytes ends."""
        end = start + size / self.storage
        return end if end <= self.turns else end + 9 * (end - max(start, self.turns))

    def progress(self, groups: Sequence[GroupBytes], ends: Ends, now: float, ready: bool, fabric: float) -> Progress:
        direct = sum(end <= now for _, end in self.back)
        ready = ready and now >= max(self.compiled, self.shares[ends.front])
        storage = self.storage if now <= self.turns else self.storage / 10
        unused = sum(group.share for group in groups[ends.front : len(self.shares)])
        return Progress(len(self.shares), direct, ready, self.free <= now, now, storage, fabric, unused)


def restore(
    groups: list[GroupBytes],
    storage: list[float],
    fabric: float,
    compiling: float = 0.3,
    connecting: float = 0.1,
    turns: float = math.inf,
) -> tuple[float, list[str], int]:
    """Returns the seconds of a restore, how each group was restored, and the number of meetings."""
    processes = [Process(rate, compiling, turns) for rate in storage]
    ends, exchange_ends, now, received, exchanging, rate, meetings = Ends(0, len(groups)), 0.0, 0.0, 0, 0.0, 0.0, 0
    done = [""] * len(groups)
    told: list[tuple[int, int]] = [(0, 0)] * len(processes)
    again = math.inf
    while ends.front < ends.back:
        arrivals = []
        for at, process in enumerate(processes):
            upto = min(ends.front + 1 + shares_ahead(AHEAD["spread"], len(processes), ends), ends.back)
            process.read(now, shares=[group.share for group in groups[len(process.shares) : upto]])
            ready = max(now, process.shares[ends.front], exchange_ends, process.compiled)
            if (len(process.shares), len(process.back)) != told[at]:  # come also if all is read that may be read
                ready = min(ready, max(now, process.free))
            ready = min(ready, max(now, process.free, again))  # or later, if the boundary may move then
            told[at] = (len(process.shares), len(process.back))
            arrivals.append(ready)
        now = max(arrivals)
        meetings += 1
        if exchange_ends <= now:
            rate = received / exchanging if exchanging else 0.0
        progress = [process.progress(groups, ends, now, exchange_ends <= now, rate) for process in processes]
        boundary = next_boundary(groups, ends, progress)
        assert ends.front <= boundary <= ends.back
        assert boundary == next_boundary(groups, ends, progress[::-1])  # in whichever order they are told
        again = math.inf if boundary < ends.back else meet_again_after(groups, ends, progress)
        if boundary == ends.front:
            assert max(one.unused for one in progress) <= max(group.direct for group in groups)
        for number in range(ends.back - 1, boundary - 1, -1):
            assert done[number] == ""
            done[number] = "direct"
        for process in processes:
            process.read(now, back=[group.direct for group in groups[boundary : ends.back][::-1]])
        ends = Ends(ends.front, boundary)
        if ends.front < ends.back and all(one.ready for one in progress):
            if not exchanging:
                now += connecting
            seconds = groups[ends.front].link / fabric
            exchange_ends, exchanging, received = (
                now + seconds,
                exchanging + seconds,
                received + groups[ends.front].link,
            )
            assert done[ends.front] == ""
            done[ends.front] = "exchanged"
            ends = Ends(ends.front + 1, ends.back)
    return max(now, exchange_ends, *(process.free for process in processes)), done, meetings


@pytest.mark.parametrize(
    ("share", "direct", "link", "most"),
    [
        (0.25, 1.0, 0.01, 4.5),  # slow storage: spread takes 4.0 s, direct reads 16
        (0.25, 1.0, 0.75, 9.5),  # alike: 12 and 16 s, and a mixture is best
        (0.05, 0.2, 1.0, 3.9),  # storage five times as fast as the fabric: 16 and 3.2 s
        (0.005, 0.02, 0.5, 0.6),  # page cache: direct reads take 0.32 s, which is when programs are compiled
    ],
    ids=["slow storage", "alike", "fast storage", "page cache"],
)
def test_a_restore_takes_about_as_long_as_the_best_mixture(
    share: float, direct: float, link: float, most: float
) -> None:
    unit = 1000
    groups = [GroupBytes(int(share * unit), int(direct * unit), int(link * unit))] * 16
    seconds, done, _ = restore(groups, [float(unit)] * 4, float(unit))
    assert set(done) <= {"direct", "exchanged"}
    assert seconds <= most


@pytest.mark.parametrize(("compiling", "most"), [(0.0, (4.1, 9.5, 3.2)), (2.0, (5.6, 9.8, 3.6))])
def test_a_restore_takes_about_as_long_however_long_compiling_takes(
    compiling: float, most: tuple[float, float, float]
) -> None:
    loads = [GroupBytes(250, 1000, 10), GroupBytes(250, 1000, 750), GroupBytes(50, 200, 1000)]
    for load, limit in zip(loads, most, strict=True):
        seconds, _, _ = restore([load] * 16, [1000.0] * 4, 1000.0, compiling)
        assert seconds <= limit


@pytest.mark.parametrize("turns", [0.5, 1.0, 2.0])
def test_the_boundary_follows_if_storage_becomes_slow(turns: float) -> None:
    groups = [GroupBytes(50, 200, 1000)] * 16  # storage five times as fast as the fabric
    seconds, done, _ = restore(groups, [1000.0] * 4, 1000.0, turns=turns)
    only_exchanges, only_reads = 16.4, turns + 10 * (3.2 - turns)
    assert seconds < min(only_exchanges, only_reads)
    assert done.count("exchanged") >= 2


def test_a_simulated_process_reads_shares_before_groups_from_the_back() -> None:
    process = Process(storage=1.0, compiled=0.0)
    process.read(0.0, shares=[1, 1])
    process.read(0.0, back=[4, 4])
    assert (process.shares, process.back) == ([1.0, 2.0], [(2.0, 6.0), (6.0, 10.0)])
    process.read(3.0, shares=[2], back=[4])
    assert (process.shares, process.back) == ([1.0, 2.0, 8.0], [(2.0, 6.0), (8.0, 12.0), (12.0, 16.0)])


def test_slow_storage_is_spread_to_the_last_group() -> None:
    groups = [GroupBytes(250, 1000, 10)] * 16
    _, done, meetings = restore(groups, [1000.0] * 4, 1000.0)
    assert done == ["exchanged"] * 16
    assert meetings == 16  # none but those that are held before exchanges


def test_nothing_is_exchanged_if_all_is_read_before_programs_are_compiled() -> None:
    groups = [GroupBytes(25, 100, 75)] * 16
    _, done, meetings = restore(groups, [1e6] * 4, 1e6, compiling=5.0)
    assert done == ["direct"] * 16
    assert meetings == 1  # all is read in far less time than programs take to compile


def test_one_slow_process_holds_the_boundary() -> None:
    groups = [GroupBytes(250, 1000, 10)] * 16
    _, done, _ = restore(groups, [1e6, 1e6, 1e6, 1000.0], 1000.0)
    assert done == ["exchanged"] * 16


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(2, 6),
    st.floats(1, 1e6),
    st.floats(1, 1e6),
    st.floats(0, 10),
    st.integers(0, 1 << 30),
)
def test_every_group_is_restored_once_whatever_the_rates(
    count: int, processes: int, storage: float, fabric: float, compiling: float, seed: int
) -> None:
    draw = random.Random(seed)
    groups = [
        GroupBytes(share := draw.randint(1, 1000), share * processes, draw.randint(0, 4000)) for _ in range(count)
    ]
    rates = [storage * draw.uniform(0.05, 1) for _ in range(processes)]
    _, done, meetings = restore(groups, rates, fabric, compiling)
    assert set(done) <= {"direct", "exchanged"}
    boundary = done.index("direct") if "direct" in done else count
    assert done == ["exchanged"] * boundary + ["direct"] * (count - boundary)
    assert meetings <= 2 * count + 8


def test_the_boundary_stays_while_a_process_has_something_to_read() -> None:
    groups, ends = [GROUP] * 8, Ends(0, 8)
    slow_fabric = dataclasses.replace(IDLE, fabric=0.01)
    assert next_boundary(groups, ends, [slow_fabric] * 4) < 8
    assert next_boundary(groups, ends, [slow_fabric] * 3 + [dataclasses.replace(slow_fabric, idle=False)]) == 8
    assert next_boundary(groups, Ends(0, 7), [dataclasses.replace(slow_fabric, direct=1)] * 3 + [slow_fabric]) == 7


def test_groups_of_which_somebody_has_read_a_share_are_not_moved_one_by_one() -> None:
    ahead = [dataclasses.replace(IDLE, ready=False, begun=begun, waiting=150.0, fabric=0.0) for begun in (3, 5)]
    assert next_boundary([GROUP] * 6, Ends(0, 6), ahead) == 5
    assert next_boundary([GROUP] * 6, Ends(0, 5), [dataclasses.replace(one, direct=1) for one in ahead]) == 5


def test_what_all_hold_as_a_whole_does_not_travel() -> None:
    """All shares are held too, so the boundary moves no further."""
    ahead = [dataclasses.replace(IDLE, begun=6, idle=False, waiting=0.0, fabric=0.0, held=held) for held in (5, 2, 6)]
    assert next_boundary([GROUP] * 6, Ends(0, 6), ahead) == 4
    later = [dataclasses.replace(one, idle=True, direct=2) for one in ahead]
    assert next_boundary([GROUP] * 6, Ends(0, 4), later) == 4
    assert next_boundary([GROUP] * 6, Ends(1, 4), [dataclasses.replace(one, fabric=1.0) for one in later]) == 4
    assert next_boundary([GROUP] * 6, Ends(0, 6), [dataclasses.replace(IDLE, begun=6, held=6)] * 2) == 0


@pytest.mark.parametrize("front", [0, 1], ids=["not compiled", "the first exchange travels"])
def test_a_group_that_takes_longer_than_has_passed_is_left_to_the_first_exchange(front: int) -> None:
    """It takes 0.4 s directly. What is waited for may be over sooner than that."""
    groups, ends = [GroupBytes(share=100, direct=400, link=300)] * 8, Ends(front, 8)
    early = dataclasses.replace(IDLE, ready=False, waiting=0.3, storage=1000.0, fabric=0.0)
    assert next_boundary(groups, ends, [early] * 4) == 8
    again = meet_again_after(groups, ends, [early] * 4)
    assert again == pytest.approx(0.4)
    later = dataclasses.replace(early, waiting=again)
    assert next_boundary(groups, ends, [early, later]) == 7
    assert meet_again_after(groups, ends, [early, later]) == math.inf
    # It begins now: then there is a share to read.
    assert next_boundary(groups, ends, [dataclasses.replace(later, ready=True)] * 4) == 8


@pytest.mark.parametrize(("front", "boundary"), [(2, 26), (3, 25), (4, 24), (8, 24)])
def test_the_back_at_most_triples_by_as_many_groups_as_were_exchanged(front: int, boundary: int) -> None:
    alike = dataclasses.replace(IDLE, begun=front, direct=2, storage=50.0, fabric=50.0)
    assert next_boundary([GROUP] * 30, Ends(front, 28), [alike] * 4) == boundary


def test_nobody_meets_again_if_somebody_reads_or_the_rate_of_the_fabric_is_known() -> None:
    early = dataclasses.replace(IDLE, ready=False, fabric=0.0)
    assert meet_again_after([GROUP] * 8, Ends(1, 8), [early, dataclasses.replace(early, idle=False)]) == math.inf
    assert meet_again_after([GROUP] * 8, Ends(1, 8), [IDLE] * 2) == math.inf


@pytest.mark.parametrize(("unused", "boundary"), [(100, 0), (150, 3)], ids=["one group", "more"])
def test_no_more_than_one_group_is_read_for_nothing(unused: int, boundary: int) -> None:
    slow_fabric = dataclasses.replace(IDLE, fabric=0.01, direct=1, unused=unused)  # shares of three groups are read
    assert next_boundary([GROUP] * 4, Ends(0, 3), [slow_fabric] * 2) == boundary


def test_the_first_share_is_a_part_of_all_groups() -> None:
    assert part_of_first_share([GROUP] * 8) == pytest.approx(25 / 800)
    assert part_of_first_share([]) == 1.0


def test_progress_survives_the_wire() -> None:
    assert Progress.from_json(IDLE.to_json()) == IDLE


def test_bytes_of_groups_are_those_of_the_busiest_process() -> None:
    mesh = MeshInfo(("dp", "tp"), (4, 2), (0, 0, 1, 1, 2, 2, 3, 3))
    leaves = [
        Leaf(f"w{n}", (2048, 4096), "bfloat16", 2, (1024, 4096), 0, (("tp",), ()), chunk=(256, 4096), divisible=True)
        for n in range(4)
    ]
    plan = make_plan(leaves, [mesh], Options(), processes=4, group_bytes=16 * MIB)
    assert bytes_of_groups(plan, [mesh], 4) == [GroupBytes(8 * MIB, 32 * MIB, 24 * MIB)] * 2


@pytest.mark.parametrize(("ready", "boundary"), [(False, 0), (True, 3)], ids=["not compiled", "compiled"])
def test_nothing_is_compiled_for_what_is_read_in_less_time(ready: bool, boundary: int) -> None:
    read = dataclasses.replace(IDLE, ready=ready, waiting=0.1, storage=1000.0, fabric=0.0)
    assert next_boundary([GROUP] * 3, Ends(0, 3), [read] * 2) == boundary  # all three take 0.3 s directly


@pytest.mark.parametrize(
    ("changed", "front", "boundary"),
    [
        ({}, 0, 0),
        ({"storage": 1000.0}, 0, 15),  # 1.6 s
        ({"begun": 12}, 0, 15),  # read ahead of the restore
        ({}, 1, 15),  # programs are compiled, and the first exchange travels
    ],
    ids=["fast storage", "slower storage", "held", "exchanged"],
)
def test_all_is_read_directly_at_once_if_that_takes_less_time_than_to_compile(
    changed: dict[str, Any], front: int, boundary: int
) -> None:
    read = dataclasses.replace(IDLE, begun=3, ready=False, waiting=0.1, storage=10_000.0, fabric=0.0)
    progress = [read, dataclasses.replace(read, **changed)]
    assert next_boundary([GROUP] * 16, Ends(front, 16), progress) == boundary
