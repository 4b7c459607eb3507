"""An environment with a released Orbax, or with the fork built from it, and a cluster that runs it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

from orbax_ext import lab, version
from tools import releases

_CONSTRAINTS = {"0.11.33": "oldest"}  # the other releases: newest


@dataclasses.dataclass
class Installation:
    """An Orbax in an environment of its own, and 4 processes x 4 devices that run it."""

    release: str
    patched: bool
    cluster: lab.Cluster
    python: str
    directory: pathlib.Path

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """Returns the exit code and the report of `orbax-ext doctor` in this environment."""
        command = [self.python, "-m", "orbax_ext.cli", "doctor", "--json"]
        done = subprocess.run(command, cwd=releases.ROOT, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, json.loads(done.stdout)

    def older_than(self, release: str) -> bool:
        return version.numbers(self.release) < version.numbers(release)


def install(release: str, wheel: pathlib.Path) -> pathlib.Path:
    """Installs a wheel in the environment of its release, which is made once, and returns that environment's Python."""
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
