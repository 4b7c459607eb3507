from __future__ import annotations

import json
import pathlib
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from orbax_ext.cli import exits, main
from orbax_ext.plan.forecast import forecast
from tests.support import checkpoints

pytestmark = pytest.mark.once

MODEL = """
# a model in a few lines
embed           bfloat16  1024x512  P(tp)         128x512
layers.{0..3}.w bfloat16  512x2048  P(None, tp)
layers.{0..3}.b float32   512
step            int32     ()
"""


def plan(capsys: pytest.CaptureFixture[str], *args: Any, code: int = exits.EXIT_OK) -> Any:
    assert main.main(["plan", "--json", *map(str, args)]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "model.txt"
    path.write_text(MODEL)
    return path


def test_a_described_model_is_planned(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--shapes", model, "--mesh", "pp=1,dp=4,tp=8", "--processes", 4)
    assert found["leaves"] == 10
    size = 2 * 1024 * 512 + 4 * (2 * 512 * 2048 + 4 * 512) + 4
    assert found["logical_bytes"] == size
    assert found["strategies"]["direct"]["read_by_process"] == [size] * 4
    assert found["strategies"]["spread"]["bytes_read"] == size
    single = found["strategies"]["single"]
    assert single["read_by_process"] == [size, 0, 0, 0]
    assert single["received_by_process"][0] == 0
    assert sum(group["leaves"] for group in single["groups"]) == 10


def test_a_checkpoint_is_planned_with_the_specs_that_it_was_saved_with(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.save(tmp_path / "run")
    args = [tmp_path / "run", "--mesh", "dp=2,tp=4", "--processes", 2]
    found = plan(capsys, *args)
    large = checkpoints.LARGE
    assert large / 4 < found["bytes_per_device"] < large / 3  # P(None, tp)
    because = found["strategies"]["auto"]["because"]
    assert because["direct: it is a typed PRNG key"] == ["key"]
    assert because["direct: it was saved as a np.ndarray, not as an array on devices"] == ["table"]
    found = plan(capsys, *args, "--spec", "params.large=P()", "--spec", "nobody=P(tp)")
    assert large < found["bytes_per_device"]
    assert found["notes"] == ["--spec 'nobody' matches no leaf"]
    found = plan(capsys, tmp_path / "run", "--mesh", "x=8", "--processes", 8)
    assert "sharded less" in found["notes"][0]
    assert "params.large" in found["notes"][0]


def test_the_text_tells_what_auto_picks_and_who_reads(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "--shapes", str(model), "--mesh", "dp=4,tp=8", "--processes", "4"]) == exits.EXIT_OK
    shown = capsys.readouterr().out
    assert "10 leaves" in shown
    for strategy in forecast.STRATEGIES:
        assert f"\n  {strategy} " in shown
    assert "auto picks\n  " in shown
    assert "MB/s a process, assumed" in shown
    assert "who reads what" in shown


def test_thousands_of_processes_are_planned_and_drawn(
    tmp_path: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    args = ["--shapes", model, "--mesh", "pp=16,dp=256,tp=8", "--processes", 4096, "--storage-total-gbps", 100]
    found = plan(capsys, *args, "--svg", picture)
    assert len(found["strategies"]["auto"]["read_by_process"]) == 4096
    assert len(ElementTree.parse(picture).findall(".//{*}title")) == 3 * 256


def test_the_picture_shows_the_bytes_of_every_process(
    tmp_path: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    found = plan(capsys, "--shapes", model, "--mesh", "dp=4,tp=8", "--processes", 4, "--svg", picture)
    bars = ElementTree.parse(picture).findall(".//{*}g")
    heights = [[float(bar.get("height", "nan")) for bar in group.findall("{*}rect")] for group in bars]
    names = ["spread", "single", "direct"]
    for column, key in enumerate(["read_by_process", "received_by_process"]):
        drawn = [pair[column] for pair in heights]
        expected = [value for name in names for value in found["strategies"][name][key]]
        assert [round(height / max(drawn), 2) for height in drawn] == [
            round(value / max(expected), 2) for value in expected
        ]


def test_a_state_that_does_not_fit_is_a_bad_verdict(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--shapes", model, "--mesh", "dp=4,tp=8", "--processes", 4, "--memory", 0.001]
    assert "DOES NOT FIT" in plan(capsys, *args, code=exits.EXIT_BAD_VERDICT)["notes"][-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "dp=4,tp=8", "--processes", "3"], "32 devices of the mesh do not divide over 3 processes"),
        (["--mesh", "dp:4", "--processes", "4"], "as in pp=1,dp=4,tp=8"),
        (["--mesh", "dp=4", "--processes", "4", "--spec", "embed=P(tp)"], "the mesh (dp=4) lacks"),
        (["--mesh", "dp=4", "--processes", "4", "--storage-gbps", "0"], "--storage-gbps must be above 0"),
        (["--mesh", "dp=4", "--processes", "4", "--replica-axis", "tp"], "'tp' is not an axis of the mesh"),
        (["--mesh", "dp=4", "--processes", "4", "--svg", "{tmp}/no/where.svg"], "No such file or directory"),
    ],
)
def test_what_can_not_be_planned_is_told_in_one_line(
    args: list[str], message: str, model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--shapes", str(model), *(word.format(tmp=tmp_path) for word in args)]
    assert main.main(words) == exits.EXIT_CANNOT_RUN
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_predictions_are_compared_with_what_the_benchmark_measured() -> None:
    from bench import predictions, results, scenarios

    dense = next(iter(scenarios.scenarios()))
    runs = [results.Run(seconds, True, 0, 0, 0, 0.0, 0.0) for seconds in (100.0, 100.0)]
    failed = [results.Run(0.0, False, 0, 0, 0, 0.0, 0.0, error="no")]
    found = [results.result(dense, "spread", runs), results.result(dense, "single", failed)]
    predicted = predictions.predict(dense, "spread")
    assert dense.limit() < predicted < 2 * dense.limit()
    assert predictions.table(found).splitlines()[2:] == [
        f"| dense | spread | {predicted:.2f} | 100.00 | {predicted / 100 - 1:+.0%} |",
        "",
        f"Error: {1 - predicted / 100:.0%} in the middle, {1 - predicted / 100:.0%} at worst.",
    ]
