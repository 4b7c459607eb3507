"""The results of the benchmark of the emergency manager are merged, and compared with what was to be reached."""

from __future__ import annotations

import pathlib
import types

import pytest

from bench import emergency, emergency_results, network
from bench.emergency_results import ONE_HOST_LOST, OURS, PLAIN, STOCK, Result

pytestmark = pytest.mark.once


def result(case: str, implementation: str, seconds: float, mib: int = 512, commit: str = "") -> Result:
    size = mib << 20
    about = f"about {case}"
    return Result(case, about, implementation, seconds, (seconds,), size, size, size, True, 2.6, size, size, commit)


RESULTS = [
    result(PLAIN, PLAIN, 55.0),
    result(ONE_HOST_LOST, STOCK, 16.0),
    result(ONE_HOST_LOST, OURS, 3.2),
    result("nobody", STOCK, 20.0),
    result("nobody", OURS, 21.0),
]


def measured(results: list[Result]) -> dict[str, str]:
    """Returns the last column of the table of figures, by its first."""
    rows = [line.strip("| ").split(" | ") for line in emergency_results.figures_table(results).splitlines()[2:]]
    return {cells[0]: cells[-1] for cells in rows}


def test_figures_are_met_or_not() -> None:
    assert measured(RESULTS) == {
        "one host lost: at least 4 times as fast as stock": "yes",
        "one host lost: at least 10 times as fast as plain": "yes",
        "one host lost: within 1.3 times what the fabric allows": "yes",
        "about one_host_lost: not slower than stock": "yes",
        "about nobody: not slower than stock": "**no**",
    }
    slower = measured(emergency_results.merged(RESULTS, result(ONE_HOST_LOST, OURS, 5.6)))
    assert [met for about, met in slower.items() if about.startswith("one host lost")] == ["**no**"] * 3


def test_figures_without_a_result_are_not_met() -> None:
    assert set(measured(RESULTS[:2]).values()) == {"not measured"}


def test_a_new_result_replaces_the_one_of_its_case_and_implementation() -> None:
    new = result(ONE_HOST_LOST, OURS, 4.0, commit="abc")
    merged = emergency_results.in_order(emergency_results.merged(RESULTS, new), [PLAIN, "nobody", ONE_HOST_LOST])
    assert merged == [RESULTS[0], RESULTS[3], RESULTS[4], RESULTS[1], new]


def test_results_of_another_state_do_not_stand_beside_a_new_one() -> None:
    new = result("nobody", OURS, 1.0, mib=16)
    assert emergency_results.merged(RESULTS, new) == [new]


def test_results_come_back_from_their_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "results" / "emergency.json"
    assert emergency_results.load(file) == []
    emergency_results.save(RESULTS, file)
    assert emergency_results.load(file) == RESULTS


def test_some_cases_are_written_beside_earlier_results(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "emergency.json"
    emergency_results.save(RESULTS, file)
    load, save = emergency_results.load, emergency_results.save
    monkeypatch.setattr(emergency_results, "load", lambda: load(file))
    monkeypatch.setattr(emergency_results, "save", lambda results: save(results, file))
    monkeypatch.setattr(emergency_results, "PAGE", types.SimpleNamespace(path="page", write=print))
    monkeypatch.setattr(network, "why_not", lambda: "")
    new = result(ONE_HOST_LOST, OURS, 5.6, commit="abc")
    monkeypatch.setattr(emergency, "run_all", lambda *args: iter([new]))
    assert emergency.main(["--only", ONE_HOST_LOST, "--write"]) == 0
    assert load(file) == [*RESULTS[:2], new, *RESULTS[3:]]
    assert "Measured at commit abc, unknown." in capsys.readouterr().out
