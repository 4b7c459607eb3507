from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from bench import first_step
from bench.first_step_work import FirstStep


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


def test_each_of_the_two_alone_is_the_median_of_as_many_runs(capsys: pytest.CaptureFixture[str]) -> None:
    seconds: dict[str, list[float]] = {"restore": [9.0, 4.0, 1.0], "compile": [2.0, 10.0, 5.0]}

    def run(way: str, layers: int) -> list[FirstStep]:
        return [FirstStep(0.0, seconds[way].pop(0) if way in seconds else 6.0, 1.0, 1.0, 1.0, b"1", 0.0)]

    bench: Any = mock.Mock(run=run, layers_for=lambda restore: round(restore))
    rows, about = first_step.measure(bench, "dense", 3)
    assert about == "`dense`: 4 layers; alone, the restore takes 4.00 s and compiling 5.00 s."
    assert [row[:5] for row in rows] == [
        ["dense", "plain", "6.00", "1.20", ""],
        ["dense", "register()", "6.00", "1.20", ""],
        ["dense", "restore_async", "6.00", "1.20", "**not met**"],
        ["dense", 'restore_async, exchange="background"', "6.00", "1.20", "**not met**"],
    ]
    assert {len(row) for row in rows} == {len(first_step.HEAD)}
    assert "dense" in capsys.readouterr().out
