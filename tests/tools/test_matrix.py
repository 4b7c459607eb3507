"""The tests on every release: which combinations are run, and the table of their results."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest

from tools import matrix, releases

pytestmark = pytest.mark.once

GOOD = {"tests": 5, "failures": 0, "errors": 0, "skipped": 1, "seconds": 60}
BAD = {**GOOD, "failures": 1, "errors": 1}


def test_every_release_is_tested_with_the_jax_of_its_time_and_the_newest_ones() -> None:
    cells = matrix.cells()
    assert len(set(cells)) == len(cells)
    for release in releases.RELEASES:
        assert {(cell.python, cell.jax) for cell in cells if cell.orbax == release} == {
            ("3.11", matrix.made_for(release)),
            ("3.11", "0.10.2"),
            ("3.13", "0.12.0.1"),
        }


@pytest.mark.parametrize(
    ("release", "jax"), [("0.11.33", "0.9.0"), ("0.11.36", "0.9.2"), ("0.11.39", "0.10.0"), ("0.12.8", "0.10.2")]
)
def test_the_jax_of_a_release_is_the_newest_when_it_came_out(release: str, jax: str) -> None:
    assert matrix.made_for(release) == jax


def test_combinations_that_share_an_environment_are_adjacent() -> None:
    homes = [(cell.python, cell.jax) for cell in matrix.cells()]
    changes = sum(a != b for a, b in itertools.pairwise(homes))
    assert changes == len(set(homes)) - 1


def test_orbax_and_jax_are_pinned_to_the_combination() -> None:
    pins = matrix.pins(matrix.Cell("3.13", "0.12.0.1", "0.11.33"))
    assert {"orbax-checkpoint==0.11.33", "jax==0.12.0.1", "jaxlib==0.12.0.1"} <= set(pins)
    assert len([pin for pin in pins if pin.startswith(("orbax-checkpoint==", "jax==", "jaxlib=="))]) == 3


@pytest.mark.parametrize(
    ("result", "passed", "text"),
    [
        (GOOD, True, "4 passed, 1 skipped"),
        (BAD, False, "2 passed, **2 failed**, 1 skipped"),
        ({**GOOD, "tests": 0, "skipped": 0}, False, "0 passed"),
        ({"error": "no such Python\nat all", "seconds": 1}, False, "could not run: no such Python"),
        (None, False, "not run"),
    ],
)
def test_a_combination_passed_only_if_tests_ran_and_none_failed(
    result: dict[str, Any] | None, passed: bool, text: str
) -> None:
    assert matrix.passed(result) is passed
    assert matrix.describe(result) == text


def test_the_table_has_a_row_for_each_release() -> None:
    rows = matrix.table({matrix.Cell("3.11", "0.9.0", "0.11.33").key: GOOD}).splitlines()
    assert len(rows) == 2 + len(releases.RELEASES)
    assert rows[2] == "| 0.11.33 | JAX 0.9.0: 4 passed, 1 skipped | not run | not run |"
    assert rows[-1] == "| 0.12.8 | JAX 0.10.2: not run | the same | not run |"


def test_results_count_only_for_the_sources_that_they_were_measured_with(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix.json")
    cell = matrix.Cell("3.11", "0.9.0", "0.11.33")
    matrix.save("digest", cell, GOOD)
    assert matrix.load("digest") == {cell.key: GOOD}
    assert matrix.load("another digest") == {}
