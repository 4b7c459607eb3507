"""Clean environments with a released Orbax, then with the fork built from it, and a cluster in each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from orbax_ext import lab, version
from tests.fork import scenarios
from tools import fork, releases

RELEASES = ("0.11.33", "0.12.3", "0.12.8")  # the oldest, one in the middle, the newest
_CONSTRAINTS = {"0.11.33": "oldest"}  # else newest


@dataclasses.dataclass
class Installation:
    """An Orbax in an environment of its own, and 4 processes x 4 devices that run it."""

    release: str
    patched: bool
    cluster: lab.Cluster
    python: str
    directory: pathlib.Path

    def restored(self, outcomes: list[lab.Outcome]) -> bool:
        """Whether every process got every leaf, bit for bit."""
        return all(outcome.ok and outcome.value == {} for outcome in outcomes)

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """The exit code and the report of `orbax-ext doctor` in this environment."""
        command = [self.python, "-m", "orbax_ext.cli", "doctor", "--json"]
        done = subprocess.run(command, cwd=releases.ROOT, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, json.loads(done.stdout)

    def older_than(self, release: str) -> bool:
        return version.numbers(self.release) < version.numbers(release)


@pytest.fixture(
    scope="module",
    params=[(release, kind) for release in RELEASES for kind in ("stock", "fork")],
    ids=lambda param: "-".join(param),
)
def orbax(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    release, kind = request.param
    directory = tmp_path_factory.mktemp(f"{kind}-{release}")
    wheel = fork.build(release, directory) if kind == "fork" else releases.wheel(release)
    python = _environment(release, wheel)
    with lab.Cluster(4, 4, python=str(python), log_dir=directory / "logs") as cluster:
        wanted = f"{release}+ext.{fork.FORK}" if kind == "fork" else release
        assert set(cluster.run(scenarios.installed_version)) == {wanted}
        yield Installation(release, kind == "fork", cluster, str(python), directory)


def _environment(release: str, wheel: pathlib.Path) -> pathlib.Path:
    """The Python of an environment made for this release, with this wheel in it."""
    home = releases.ROOT / "build" / "fork" / release
    python = home / "bin" / "python"
    name = _CONSTRAINTS.get(release, "newest")
    pins = (releases.ROOT / "constraints" / f"{name}.txt").read_text().splitlines(keepends=True)
    if not (home / "ready").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(home))
        constraints = home / "constraints.txt"
        constraints.write_text("".join(pin for pin in pins if not pin.startswith("orbax-checkpoint")))
        _run(str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), str(releases.wheel(release)))
        (home / "ready").touch()
    _run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=900)
