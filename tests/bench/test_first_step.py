from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from bench import first_step
from bench.first_step import Case
from bench.first_step_work import FirstStep
from bench.network import Links

USUAL = Links(320, 1600)


@pytest.mark.parametrize(
    ("way", "times", "judgement"),
    [
        ("restore_async", 1.15, "met"),
        ("restore_async", 1.154, "met"),  # as the table shows it
        ("restore_async", 1.16, "**not met**"),
        ('restore_async, exchange="background"', 2.0, "**not met**"),
        ("plain", 2.0, ""),
        ("register()", 1.0, ""),
    ],
)
def test_what_is_to_be_reached_is_judged(way: str, times: float, judgement: str) -> None:
    assert first_step.judged(way, times) == judgement


def test_each_of_the_two_alone_is_the_median_of_as_many_runs() -> None:
    seconds: dict[str, list[float]] = {"restore": [9.0, 4.0, 1.0], "compile": [2.0, 10.0, 5.0]}

    def run(way: str, layers: int) -> list[FirstStep]:
        return [FirstStep(0.0, seconds[way].pop(0) if way in seconds else 6.0, 1.0, 1.0, 2.0, 1.0, b"1", 2.0)]

    bench: Any = mock.Mock(run=run, layers_for=lambda restore: round(restore))
    case = Case("each", USUAL)
    with mock.patch.object(first_step, "_CORES", 2):
        found = first_step.measure(bench, case, 3)
        about = first_step.about(case, found)
    assert about.startswith(
        "- *each*: storage 320 Mbit/s, fabric 1600; 4 layers. Alone, the restore takes 4.00 s and 6 processor seconds, "
        "compiling 5.00 s and 8. One after the other all took 10 processor seconds, which 2 cores have in 5.0 s, 1.00x."
    )
    rows = first_step.rows(case, found)
    assert [row[:5] for row in rows] == [
        ["each", "plain", "6.00", "1.20", ""],
        ["each", "register()", "6.00", "1.20", ""],
        ["each", "restore_async", "6.00", "1.20", "**not met**"],
        ["each", 'restore_async, exchange="background"', "6.00", "1.20", "**not met**"],
    ]
    assert {len(row) for row in rows} == {len(first_step.HEAD)}


def test_compiling_may_take_as_long_as_plain_orbax_restores() -> None:
    def run(way: str, layers: int) -> list[FirstStep]:
        return [FirstStep(0.0, 7.0, 1.0, 1.0, 2.0, 1.0, b"1", 2.0)]

    bench: Any = mock.Mock(run=run, layers_for=lambda restore: round(restore))
    case = Case("long", USUAL, one_compiles=True, long=True, ways=first_step.WAYS[1:])
    found = first_step.measure(bench, case, 1)
    assert found["layers"] == 27
    assert [*found["ways"]] == [*first_step.WAYS[1:]]


@pytest.mark.parametrize(
    ("compiling", "left"),
    [
        (0.0, 6.71 + 4.03),  # reads a quarter at 320 Mbit/s, receives the rest at 1600
        (6.71, 4.03),
        (6.71 + 26.84 / 2, 4.03 / 2),
        (60.0, 0.0),
    ],
)
def test_the_links_need_less_the_longer_a_program_compiles(compiling: float, left: float) -> None:
    assert first_step.left_to_exchange(USUAL, compiling) == pytest.approx(left, abs=0.01)
