"""`orbax-ext demo`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from orbax_ext.cli import exits, main


def test_the_demo_succeeds_when_our_restore_is_exact() -> None:
    command = [sys.executable, "-m", "orbax_ext.cli", "demo", "--processes", "2", "--devices", "2", "--megabytes", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == exits.EXIT_OK, done.stderr
    rows = {row["way"]: row for row in json.loads(done.stdout)}
    assert rows["plain Orbax"]["exact"]
    assert not rows["Orbax, single replica"]["exact"]
    assert rows["orbax_ext"]["exact"]
    assert rows["orbax_ext"]["megabytes_read"] < rows["plain Orbax"]["megabytes_read"]


def test_bad_arguments_are_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["demo", "--processes", "1"]) == exits.EXIT_CANNOT_RUN
    assert capsys.readouterr().err == (
        "orbax-ext demo: a demo needs at least 2 processes, 1 device each and 1 megabyte\n"
    )
