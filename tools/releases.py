"""The supported Orbax releases, and their wheels from the package index."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "wheels"
PATCHES = ROOT / "patches"

RELEASES = (
    *(f"0.11.{patch}" for patch in range(33, 41)),
    *(f"0.12.{patch}" for patch in range(9)),
)


def between(first: str, last: str) -> tuple[str, ...]:
    """Returns the releases from `first` to `last`, both included."""
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]


def wheel(release: str) -> pathlib.Path:
    """Returns the released wheel; downloads it from the package index the first time."""
    path = WHEELS / f"orbax_checkpoint-{release}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(WHEELS), f"orbax-checkpoint=={release}"], check=True, timeout=600)
    return path


def read(release: str, paths: tuple[str, ...]) -> dict[str, bytes]:
    """Returns files of a release, by path."""
    with zipfile.ZipFile(wheel(release)) as archive:
        return {path: archive.read(path) for path in paths}
