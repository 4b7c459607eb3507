"""What .ci/run installs before the checks, what the Makefile runs, and how workers share the tests."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

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


@pytest.mark.parametrize("arguments", ["", "-k name"])
def test_tests_marked_once_run_on_the_newest_release_only(arguments: str) -> None:
    # This test may itself run under make, whose options a make below it takes over from the environment.
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "RETRY", "WORKERS")
    environ = {name: value for name, value in os.environ.items() if name not in of_make}

    def command(target: str) -> str:
        make = ["make", "--dry-run", target, f"PYTEST_ARGS={arguments}"]
        done = subprocess.run(
            make, env=environ, cwd=releases.ROOT, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip().splitlines()[-1]

    assert command("test-oldest").endswith(f" -m 'not fork and not long and not once' {arguments}".rstrip())
    assert "not once" not in command("test-newest")


def test_a_worker_gets_whole_files() -> None:
    """A release of pytest or xdist may change this without a word; then all workers start the same clusters."""
    files = {"tests/test_text.py", "tests/test_redact.py", "tests/test_version.py"}
    # This test may itself run on a worker.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    makefile = (releases.ROOT / "Makefile").read_text()
    (parallel,) = re.findall(r"^PARALLEL = -n \$\(WORKERS\) (.*)$", makefile, re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "2", *parallel.split(), *files]
    done = subprocess.run(
        command, env=environ, cwd=releases.ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    ran = set(re.findall(r"^\[(gw\d)\].* PASSED (tests/\w+\.py)", done.stdout, re.MULTILINE))
    assert {worker for worker, _ in ran} == {"gw0", "gw1"}
    assert sorted(file for _, file in ran) == sorted(files)  # none on both
