"""Commands that need no JAX do not import JAX, Orbax or TensorStore: importing takes longer than the commands do."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from orbax_ext.cli import exits
from tests.support import reports
from tests.support.installed_orbax import files_to_patch

pytestmark = pytest.mark.once

HEAVY = ("jax", "jaxlib", "orbax.checkpoint", "tensorstore")
SCRIPT = f"""
import json, sys
from orbax_ext.cli.main import main
try:
    code = main()
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]))
"""

MODEL = "embed bfloat16 1024x512 P(tp)\nscale float8_e4m3fn 512\nlayers.{0..3}.w int4 512x2048 P(None,tp)\n"
PLAN = ["plan", "--shapes", "{tmp}/model.txt", "--mesh", "dp=4,tp=8", "--processes", "4"]
COMMANDS = {
    "help": ["--help"],
    "version": ["--version", "plan"],
    "plan --help": ["plan", "--help"],
    "plan": PLAN,
    "plan as JSON and as a picture": [*PLAN, "--json", "--svg", "{tmp}/plan.svg"],
    "report --help": ["report", "--help"],
    "report": ["report", "{tmp}/report.json"],
    "report as a page and a trace": [
        "report",
        "{tmp}/report.json",
        "--html",
        "{tmp}/p.html",
        "--trace",
        "{tmp}/t.json",
    ],
    "report as JSON": ["report", "{tmp}/report.json", "--json"],
    "patch --help": ["patch", "--help"],
    "patch": ["patch", "--to", "{tmp}"],
    "patch --reverse": ["patch", "--to", "{tmp}", "--reverse"],
    "doctor --help": ["doctor", "--help"],
    "run --help": ["run", "--help"],
    "run": ["run", "--replica-axis", "dp", "{tmp}/model.py"],
}
REFUSED = {
    "no command": [],
    "an unknown command": ["plant"],
    "a bad option": ["plan", "--no-such-option"],
    "a missing file": ["plan", "--shapes", "{tmp}/none", "--mesh", "dp=4", "--processes", "4"],
    "a bad knob": ["run", "--timeout", "soon", "{tmp}/model.py"],
    "a report that is none": ["report", "{tmp}/model.txt"],
}


@pytest.fixture
def tmp(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with a described model, a report, and Orbax's files that the patches change."""
    (tmp_path / "model.txt").write_text(MODEL)
    (tmp_path / "model.py").write_text("model = 1")
    (tmp_path / "report.json").write_text(reports.make_report(4).to_json())
    for path, data in files_to_patch().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


def run(words: list[str], tmp: pathlib.Path) -> tuple[int, list[str], str]:
    """Returns a command's exit code, the heavy modules that it imported, and its standard error."""
    command = [sys.executable, "-c", SCRIPT, *(word.format(tmp=tmp) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    code, heavy = json.loads(done.stdout.splitlines()[-1])
    return code, heavy, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_light_command_imports_nothing_heavy(name: str, tmp: pathlib.Path) -> None:
    assert run(COMMANDS[name], tmp) == (exits.EXIT_OK, [], "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_in_one_line_and_without_heavy_imports(name: str, tmp: pathlib.Path) -> None:
    code, heavy, error = run(REFUSED[name], tmp)
    assert (code, heavy) == (exits.EXIT_CANNOT_RUN, [])
    assert error.startswith("orbax-ext")
    assert error.count("\n") == 1
