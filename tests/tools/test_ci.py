"""What .ci/run installs before the checks."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tools import releases

pytestmark = pytest.mark.once

PROGRAMS = {
    "id": "echo 0",
    "make": "exit 0",
    # Like apt-get, it installs nothing of a call in which it does not know one name.
    "apt-get": 'case "$*" in *" $UNKNOWN"*) exit 100; esac; echo "$*" >> "$INSTALLED"',
}


@pytest.mark.parametrize(
    ("unknown", "installed", "absent"),
    [("chromium", "slurm-wlm munge", "chromium"), ("munge", "nginx-light", "slurm-wlm")],
)
def test_an_unknown_package_does_not_keep_away_those_for_other_tests(
    tmp_path: pathlib.Path, unknown: str, installed: str, absent: str
) -> None:
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "installed"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "UNKNOWN": unknown, "INSTALLED": str(calls)}
    command = [releases.ROOT / ".ci" / "run"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert installed in calls.read_text()
    assert absent not in calls.read_text()
    assert f"Could not install {absent}" in done.stdout
