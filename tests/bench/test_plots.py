"""The plot in README: which results it shows, and that it shows those of results.json."""

from __future__ import annotations

import pytest

from bench import readme_plot, results
from bench.results import Result, Run
from bench.scenarios import scenarios

pytestmark = pytest.mark.once

KNOWN = {scenario.name: scenario for scenario in scenarios()}


def measured(scenario: str, strategy: str, seconds: float, *, exact: bool = True, busy: bool = False) -> Result:
    return results.result(KNOWN[scenario], strategy, [Run(seconds, exact, 0, 0, 0, 0.0, 0.0)], busy=busy)


def test_rows_and_bars_are_in_order_and_only_of_the_quiet_machine() -> None:
    some = [
        measured("small_leaves", "auto", 3.0),
        measured("dense", "auto", 7.0),
        measured("dense", "spread", 7.5),
        measured("dense", "stock", 49.0, exact=False),
        measured("dense", "plain", 27.0),
        measured("dense", "auto", 12.0, busy=True),
        measured("jitter", "auto", 9.0),
        measured("fsdp_dp", "plain", 2.0),  # nothing of ours to compare it with
    ]
    notes = {name: [readme_plot.note(one) for one in row] for name, row in readme_plot.shown(some).items()}
    assert notes == {"dense": ["27.0 s", "49.0 s, not exact", "7.0 s"], "small_leaves": ["3.0 s"]}
    assert list(notes) == ["dense", "small_leaves"]


def test_scenarios_of_the_plot_exist_and_are_few() -> None:
    assert set(readme_plot.SHOWN) <= set(KNOWN)
    assert len(readme_plot.SHOWN) <= 8


@pytest.mark.parametrize("theme", sorted(readme_plot.THEMES))
def test_the_plot_shows_the_results_as_they_are(theme: str) -> None:
    drawn = results.RESULTS.with_name(f"readme-{theme}.svg").read_text()
    rows = readme_plot.shown(results.load().results)
    assert rows
    for row in rows.values():
        for one in row:
            assert f">{readme_plot.note(one)}</text>" in drawn, "run: make docs"
